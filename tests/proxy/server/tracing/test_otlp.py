import asyncio
import logging
import sys

import pytest
from opentelemetry.sdk.metrics.export import Gauge, Histogram, Sum
from structlog.testing import capture_logs

from engine_adapter import HttpTransport
from proxy.fleet.fleet import Fleet
from proxy.observe.metrics import Metrics
from proxy.server.app import Proxy
from proxy.server.tracing.otlp import EVERY_S, Complaints, Telemetry, read
from proxy.settings import Settings, SettingsError
from tests.fakes import ASK, CHAT, add_ready
from tests.kv_world import until
from tests.proxy.observe.test_metrics import record


async def test_metrics_are_sent_again_and_again_and_each_process_has_a_name(traced, collector, monkeypatch):
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    async with traced() as (_, client):
        await client.post(CHAT, json=ASK)
        for _ in range(2):
            collector.got_metrics.clear()
            assert await asyncio.to_thread(collector.got_metrics.wait, 30)
    (point,) = collector.metrics["kvpin_requests_total"].sum.data_points
    assert point.as_double == 1
    (point,) = collector.metrics["kvpin_request_duration_seconds"].histogram.data_points
    assert (point.count, point.HasField("min")) == (1, False)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=front,deployment.environment.name=test")
    async with traced() as (_, client):
        await client.post(CHAT, json=ASK)
    first, second = collector.spans[0].resource, collector.spans[-1].resource
    assert (first["service.name"], second["service.name"]) == ("kvpin", "front")
    assert second["deployment.environment.name"] == "test"
    assert first["service.instance.id"] != second["service.instance.id"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "'zipkin': it must be 'otlp' or 'none'"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "must be 'http/protobuf': kvpin has no gRPC"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "grpc", "must be 'http/protobuf'"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "foo", "must look like http://host:4318"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://h:x", "must look like http://host:4318"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "often", "must be a number of milliseconds"),
    ],
)
def test_what_kvpin_cannot_do_is_said_at_start(name, value, said, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=said):
        Telemetry(bytes)


def test_without_the_extra_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "proxy.server.tracing.otlp", None)
    with pytest.raises(SettingsError, match=r"pip install 'kvpin\[otel\]'"):
        Proxy(Settings(otel=True), HttpTransport())


async def test_a_collector_that_hangs_holds_nothing_up(traced, monkeypatch):
    hanging = []
    async with await asyncio.start_server(lambda *streams: hanging.append(streams), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
        monkeypatch.setattr("proxy.server.tracing.otlp.STOP_S", 0.1)
        async with traced() as (_, client):
            assert (await client.post(CHAT, json=ASK)).status_code == 200
        await until(lambda: hanging, 60)
        (reader, writer), *_ = hanging
        assert not reader.at_eof()  # kvpin has stopped, and its thread still waits for the collector
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()


REFUSED = (
    "Transient error HTTPConnectionPool(host='127.0.0.1', port=4318): Max retries exceeded (Caused by "
    'NewConnectionError("Failed to connect: [Errno 111] Connection refused")), retrying in 1.02s'
)


@pytest.mark.parametrize(("said", "error"), [(REFUSED, REFUSED), ("x" * 500, "x" * 300)])
def test_one_short_line_a_minute(said, error):
    complaints = Complaints()
    record = logging.LogRecord("opentelemetry.x", logging.ERROR, "", 0, said, (), None)
    with capture_logs() as lines:
        for record.created in (0.0, 1.0, EVERY_S - 1, EVERY_S, EVERY_S + 1):
            complaints.emit(record)
    assert [line["error"] for line in lines] == [error] * 2


def test_they_are_taken_from_the_packages_that_complain():
    logger = logging.getLogger("opentelemetry")
    before = logger.handlers, logger.propagate
    try:
        Complaints.take()
        with capture_logs() as lines:
            logging.getLogger("opentelemetry.exporter.x").warning("no")
        assert [line["error"] for line in lines] == ["no"]
        assert not logger.propagate
    finally:
        logger.handlers, logger.propagate = before


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
