from proxy.replay.batch import run_all
from proxy.replay.curves import Curve, Curves, curves
from proxy.replay.report import rows
from proxy.replay.simulator import ReplayRun
from tests.proxy.replay.making import ask, model_of, trace_of

TRACE = trace_of(*(ask((n % 3, 10 + n), at=n / 10) for n in range(20)))


def drawn(names, engines, sizes):
    runs = [ReplayRun(name, n, model_of(size)) for n in engines for size in sizes for name in names]
    each = rows(run_all(TRACE, runs))
    return each, curves(each)


def test_hits_and_times_over_the_engines():
    each, (hits, mean, p99) = drawn(("oracle", "kvpin"), (2, 1), (5,))
    value = {(row["policy"], row["engines"]): row["hit_percent"] for row in each}
    assert hits == Curves(
        "token hits, %",
        "engines",
        [1, 2],
        [Curve(name, [value[name, 1], value[name, 2]]) for name in ("oracle", "kvpin")],
    )
    for times in (mean, p99):
        assert [line.policy for line in times.lines] == ["kvpin"]
        assert times.is_log


def test_over_sizes_where_there_are_more_of_them():
    _, found = drawn(("kvpin",), (1, 2), (5, 9, 12))
    assert [(each.axis, each.x) for each in found] == [("GPU tokens of each engine", [500, 900, 1200])] * 6
    assert found[0].title == "token hits, % (engines: 1)"
    assert found[3].title == "token hits, % (engines: 2)"


def test_a_gap_where_a_policy_was_not_tried():
    each, _ = drawn(("kvpin", "sticky"), (1, 2), (5,))
    hits = curves([row for row in each if (row["policy"], row["engines"]) != ("sticky", 2)])[0]
    assert hits.lines[1].y[1] is None


def test_no_curve_of_one_place():
    assert drawn(("kvpin", "oracle"), (2,), (5,))[1] == []
    assert curves([]) == []
