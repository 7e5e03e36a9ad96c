"""The page is compared with what prometheus_client writes and reads."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as TheirCounter
from prometheus_client import Histogram as TheirHistogram
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from proxy.observe.metric_families import Buckets, Count, Family, SeriesOf

NASTY = 'a "quoted" \\ name,\nwith 100%d of it} 1'


def counter(*labels):
    return SeriesOf(Family("kvpin_x_total", "What x is", labels), Count)


def histogram(*labels, bounds):
    return SeriesOf(Family("kvpin_y", "What y is", labels, bounds), Buckets)


def samples(families):
    return {
        (family.name, family.type, sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def read(page):
    return samples(text_string_to_metric_families(page))


def test_counters_are_as_theirs():
    registry = CollectorRegistry()
    theirs = TheirCounter("kvpin_x", "What x is", ("model", "status"), registry=registry)
    ours = counter("model", "status")
    for model, number in (("m", 1), (NASTY, 12_345_678), ("m", 2), ("zero", 0)):
        theirs.labels(model, "200").inc(number)
        ours[model, "200"].number += number
    assert read("".join(ours.lines())) == read(generate_latest(registry).decode())
    assert len(read("".join(ours.lines()))) == 3


@pytest.mark.parametrize("labels", [(), ("model",)])
def test_histograms_are_as_theirs(labels):
    registry = CollectorRegistry()
    bounds = (0.001, 0.5, 2)
    theirs = TheirHistogram("kvpin_y", "What y is", labels, buckets=bounds, registry=registry)
    ours = histogram(*labels, bounds=bounds)
    values = (NASTY,) * len(labels)
    for number in (0, 0.001, 0.0011, 0.5, 1, 2, 2.1, 1e9):
        (theirs.labels(*values) if labels else theirs).observe(number)
        ours[values].observe(number)
    assert read("".join(ours.lines())) == read(generate_latest(registry).decode())


def test_openmetrics_is_as_theirs():
    registry = CollectorRegistry()
    theirs = TheirCounter("kvpin_x", "What x is", ("model",), registry=registry)
    timed = TheirHistogram("kvpin_y", "What y is", ("model",), buckets=(0.5, 2), registry=registry)
    ours, our_timed = counter("model"), histogram("model", bounds=(0.5, 2))
    theirs.labels(NASTY).inc(3)
    ours[(NASTY,)].number += 3
    for number, trace in ((0.1, None), (0.2, "ab12"), (0.3, "cd34"), (9.0, "ef56")):
        timed.labels(NASTY).observe(number, {"trace_id": trace} if trace else None)
        our_timed[(NASTY,)].observe(number, trace)
    page = "".join((*ours.lines(openmetrics=True), *our_timed.lines(openmetrics=True), "# EOF\n"))

    def read_all(text):
        exemplars = [
            (sample.exemplar.labels, sample.exemplar.value)
            for family in read_openmetrics(text)
            for sample in family.samples
            if sample.exemplar
        ]
        return samples(read_openmetrics(text)), exemplars

    assert read_all(page) == read_all(generate_openmetrics(registry).decode())
    assert "cd34" in page
    assert "ab12" not in page
    assert "cd34" not in "".join(our_timed.lines())
