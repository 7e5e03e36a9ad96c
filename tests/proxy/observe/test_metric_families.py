"""The page is compared with what prometheus_client writes and reads."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as TheirCounter
from prometheus_client import Histogram as TheirHistogram
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from proxy.observe.metric_families import Counter, Family, Histogram, gauge, merge_pages

NASTY = 'a "quoted" \\ name,\nwith 100%d of it} 1'


def samples(page):
    families = text_string_to_metric_families(page)
    return {
        (family.name, family.type, sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_counters_are_as_theirs():
    registry = CollectorRegistry()
    theirs = TheirCounter("kvpin_x", "What x is", ("model", "status"), registry=registry)
    ours = Counter("kvpin_x_total", "What x is", ("model", "status"))
    for model, number in (("m", 1), (NASTY, 12_345_678), ("m", 2), ("zero", 0)):
        theirs.labels(model, "200").inc(number)
        ours.of(model, "200").add(number)
    assert samples("".join(ours.lines())) == samples(generate_latest(registry).decode())
    assert len(samples("".join(ours.lines()))) == 3


def test_a_counter_counts_parts():
    counter = Counter("kvpin_x_total", "What x is", ("model", "engine"))
    counter.of("n", "a").add(0.5)
    assert 'kvpin_x_total{engine="a",model="n"} 0.5' in "".join(counter.lines())


@pytest.mark.parametrize("labels", [(), ("model",)])
def test_histograms_are_as_theirs(labels):
    registry = CollectorRegistry()
    bounds = (0.001, 0.5, 2)
    theirs = TheirHistogram("kvpin_y", "What y is", labels, buckets=bounds, registry=registry)
    ours = Histogram("kvpin_y", "What y is", labels, bounds)
    values = (NASTY,) * len(labels)
    for number in (0, 0.001, 0.0011, 0.5, 1, 2, 2.1, 1e9):
        (theirs.labels(*values) if labels else theirs).observe(number)
        ours.of(*values).observe(number)
    assert samples("".join(ours.lines())) == samples(generate_latest(registry).decode())


def test_openmetrics_is_as_theirs():
    registry = CollectorRegistry()
    theirs = TheirCounter("kvpin_x", "What x is", ("model",), registry=registry)
    timed = TheirHistogram("kvpin_y", "What y is", ("model",), buckets=(0.5, 2), registry=registry)
    ours, our_timed = (
        Counter("kvpin_x_total", "What x is", ("model",)),
        Histogram("kvpin_y", "What y is", ("model",), (0.5, 2)),
    )
    theirs.labels(NASTY).inc(3)
    ours.of(NASTY).add(3)
    for number, trace in ((0.1, None), (0.2, "ab12"), (0.3, "cd34"), (9.0, "ef56")):
        timed.labels(NASTY).observe(number, {"trace_id": trace} if trace else None)
        our_timed.of(NASTY).observe(number, trace)
    page = "".join((*ours.lines(openmetrics=True), *our_timed.lines(openmetrics=True), "# EOF\n"))

    def read(text):
        return [
            (family.name, family.type, sample.name, frozenset(sample.labels.items()), sample.value)
            + ((sample.exemplar.labels, sample.exemplar.value) if sample.exemplar else ())
            for family in read_openmetrics(text)
            for sample in family.samples
            if not sample.name.endswith("_created")
        ]

    assert read(page) == read(generate_openmetrics(registry).decode())
    assert "cd34" in page
    assert "ab12" not in page
    assert "cd34" not in "".join(our_timed.lines())


def test_a_gauge():
    family = Family("kvpin_z", "gauge", "What z is", ("engine",))
    page = "".join(gauge(family, [(("a",), True), ((NASTY,), 7)]))
    assert list(samples(page).values()) == [1, 7]
    assert page.startswith("# HELP kvpin_z What z is\n# TYPE kvpin_z gauge\n")


def test_a_family_without_series_is_on_the_page():
    pages = ("".join(f.lines()) for f in (Counter("c_total", "C", ("l",)), Histogram("h", "H", ("l",), (1,))))
    found = [family for page in pages for family in text_string_to_metric_families(page)]
    assert [(family.type, family.samples) for family in found] == [("counter", []), ("histogram", [])]


def test_a_series_is_made_once():
    family = Counter("c_total", "C", ("l",))
    assert family.of("a") is family.of("a")
    with pytest.raises(ValueError, match="zip"):
        family.of("a", "b")


ODD = 'a "b} \\ # c'


def page(*, openmetrics, requests, seconds, size, engine="e"):
    counter = Counter("kvpin_x_total", "Requests", ("engine",))
    counter.of(engine).add(requests)
    histogram = Histogram("kvpin_s", "Seconds", (), (1, 2))
    histogram.of().observe(seconds, "trace" if openmetrics else None)
    lines = [*counter.lines(openmetrics=openmetrics), *histogram.lines(openmetrics=openmetrics)]
    shown = "".join(gauge(Family("kvpin_size", "gauge", "Size", ("of",)), [((ODD,), size)]))
    return "".join((*lines, shown, "# EOF\n" if openmetrics else ""))


@pytest.mark.parametrize("openmetrics", [False, True])
def test_counts_are_summed_and_gauges_as_declared(openmetrics):
    one = page(openmetrics=openmetrics, requests=2, seconds=0.5, size=5)
    two = page(openmetrics=openmetrics, requests=3, seconds=1.5, size=7)
    merged = merge_pages([one, two], {"kvpin_size": max})
    lines = merged.splitlines()
    assert 'kvpin_x_total{engine="e"} 5.0' in lines
    counts = [line.split(" # ")[0] for line in lines if line.startswith("kvpin_s_")]
    assert counts == [
        'kvpin_s_bucket{le="1.0"} 1.0',
        'kvpin_s_bucket{le="2.0"} 2.0',
        'kvpin_s_bucket{le="+Inf"} 2.0',
        "kvpin_s_count 2.0",
        "kvpin_s_sum 2.0",
    ]
    assert any(line.endswith(" 7.0") and line.startswith("kvpin_size{") for line in lines)
    assert [line for line in lines if line.startswith("#")] == [
        line for line in one.splitlines() if line.startswith("#")
    ]
    assert merge_pages([one], {"kvpin_size": max}) == merge_pages([merge_pages([one], {})], {})


def test_a_series_of_one_worker_alone_stays():
    one = page(openmetrics=False, requests=2, seconds=0.5, size=5)
    two = page(openmetrics=False, requests=3, seconds=1.5, size=7, engine="f")
    lines = merge_pages([one, two], {"kvpin_size": min}).splitlines()
    assert {'kvpin_x_total{engine="e"} 2.0', 'kvpin_x_total{engine="f"} 3.0'} <= set(lines)


def test_a_label_may_hold_a_line_separator():
    one = "".join(gauge(Family("kvpin_size", "gauge", "Size", ("of",)), [(("a\u2028b",), 5)]))
    assert 'kvpin_size{of="a\u2028b"} 10.0' in merge_pages([one, one], {"kvpin_size": sum}).split("\n")
