"""Metrics pages of several workers as one page."""

import pytest

from proxy.observe.merged_metrics import merge_pages
from proxy.observe.metric_families import Counter, Family, Histogram, gauge

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
