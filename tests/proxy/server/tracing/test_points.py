from opentelemetry.sdk.metrics.export import Gauge, Histogram, Sum

from proxy.fleet.fleet import Fleet
from proxy.observe.metrics import Metrics
from proxy.server.tracing.points import read
from tests.fakes import add_ready
from tests.proxy.observe.test_metrics import record


def test_the_page_says_the_same_in_otlp():
    fleet = Fleet()
    add_ready(fleet, "a")
    metrics = Metrics(fleet)
    for duration_s in (0.003, 0.3, 0.3, 1e6):
        metrics.observe(record(reported_tokens=16, duration_s=duration_s))
    points = {metric.name: metric for metric in read(metrics.render().decode(), 1, 2)}
    requests = points["kvpin_requests_total"].data
    assert isinstance(requests, Sum)
    assert requests.is_monotonic
    (point,) = requests.data_points
    assert point.attributes == {"model": "m", "engine": "a", "status": "200"}
    assert (point.value, point.start_time_unix_nano, point.time_unix_nano) == (4, 1, 2)
    assert isinstance(points["kvpin_engine_ready"].data, Gauge)
    duration = points["kvpin_request_duration_seconds"]
    assert duration.unit == "s"
    assert duration.description == "From a request's arrival at kvpin to the end of its answer"
    assert isinstance(duration.data, Histogram)
    (point,) = duration.data.data_points
    assert point.attributes == {"model": "m", "engine": "a"}
    assert (point.count, point.sum) == (4, 1e6 + 0.603)
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
    assert next(iter(point.bucket_counts)) == 1
    assert point.bucket_counts[point.explicit_bounds.index(0.5)] == 2
    assert point.bucket_counts[-1] == 1


def test_every_metric_of_the_page_is_sent():
    page = Metrics(Fleet()).render().decode()
    names = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    assert {metric.name for metric in read(page, 1, 2)} == names
