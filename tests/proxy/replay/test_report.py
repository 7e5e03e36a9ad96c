import csv
import json
from io import StringIO

import pytest

from proxy.replay.report import as_csv, as_json, curves, over_seeds, rows
from proxy.replay.simulator import ReplayRun, run_all
from tests.proxy.replay.making import ask, model_of, trace_of


@pytest.fixture(scope="module")
def each():
    trace = trace_of(*(ask((n % 3, 10 + n), at=n / 10) for n in range(30)))
    runs = [
        ReplayRun(name, n, model_of(5), 1.0, seed)
        for n in (2, 1)
        for seed in (0, 1)
        for name in ("kvpin", "oracle")
    ]
    return rows(run_all(trace, runs))


def test_rows(each):
    first, oracle = each[:2]
    assert (first["policy"], first["engines"], first["seed"], first["requests"]) == ("kvpin", 2, 0, 30)
    assert first["hit_percent"] == pytest.approx(first["gpu_hit_percent"] + first["host_hit_percent"])
    assert 0 < first["p50_ttft_s"] <= first["mean_ttft_s"] * 2 <= first["p99_ttft_s"] * 4
    assert first["exact_percent"] > 50
    missing = {name for name, value in oracle.items() if value is None}
    times = {"mean_ttft_s", "p50_ttft_s", "p99_ttft_s"}
    assert missing == times | {"imbalance", "evicted_blocks", "exact_percent", "off_tokens"}


def test_seeds_are_merged_and_the_quickest_come_first(each):
    merged = over_seeds(each)
    order = [(1, "kvpin"), (1, "oracle"), (2, "kvpin"), (2, "oracle")]
    assert [(row["engines"], row["policy"]) for row in merged] == order
    one, other = (row["mean_ttft_s"] for row in each if row["engines"] == 2 and row["policy"] == "kvpin")
    assert merged[2]["mean_ttft_s"] == pytest.approx((one + other) / 2)
    assert merged[2]["spread"]["mean_ttft_s"] == pytest.approx(abs(one - other) / 2)


def test_runs_of_several_sizes_stand_apart():
    trace = trace_of(*(ask((n % 3, 10 + n), at=n / 10) for n in range(30)))
    each = rows(run_all(trace, [ReplayRun("kvpin", 1, model_of(size)) for size in (50, 5)]))
    small, large = over_seeds(each)
    assert (small["gpu_tokens"], large["gpu_tokens"]) == (500, 5000)
    assert small["hit_percent"] < large["hit_percent"]


def test_json_and_csv_hold_every_run(each):
    document = json.loads(as_json({"trace": "t"}, each, title="a title", notes=["a note"]))
    told = {"title": "a title", "settings": {"trace": "t"}, "doubts": [], "notes": ["a note"], "needs": []}
    assert document == {**told, "runs": each}
    read = list(csv.DictReader(StringIO(as_csv(each))))
    assert len(read) == len(each)
    assert read[1]["mean_ttft_s"] == ""
    assert float(read[0]["mean_ttft_s"]) == each[0]["mean_ttft_s"]


def test_hits_and_times_over_the_engines():
    trace = trace_of(*(ask((n % 3, 10 + n), at=n / 10) for n in range(20)))
    each = rows(
        run_all(trace, [ReplayRun(name, n, model_of(5)) for n in (2, 1) for name in ("oracle", "kvpin")])
    )
    hits, mean, p99 = curves(each)
    value = {(row["policy"], row["engines"]): row["hit_percent"] for row in each}
    assert hits == {
        "title": "token hits, %",
        "axis": "engines",
        "x": [1, 2],
        "lines": [{"policy": name, "y": [value[name, 1], value[name, 2]]} for name in ("oracle", "kvpin")],
        "is_log": False,
    }
    for times in (mean, p99):
        assert [line["policy"] for line in times["lines"]] == ["kvpin"]
        assert times["is_log"]
