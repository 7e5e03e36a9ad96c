"""Answers of several workers as one."""

import msgspec

from proxy.control.merged_answers import (
    merge_engines,
    merge_operation,
    merge_requests,
    merge_snapshots,
    merge_stats,
    merge_use,
)
from proxy.control.stats import stats
from proxy.core.audit import Unchecked
from proxy.observe.live import Live
from proxy.observe.metrics import Metrics
from tests.fakes import FakeEngine, proxy_over


def engine(name, *, state="ready", served=0, prefilled=0, failed=0, in_flight=0):
    return {
        "id": name,
        "state": state,
        "served": served,
        "prefilled": prefilled,
        "failed": failed,
        "in_flight": in_flight,
        "decoding": 0,
        "queue_s": 0.0,
    }


def test_load_that_all_know_is_not_counted_twice():
    answers = [
        {"engines": [engine("a", served=4, prefilled=6, failed=1, in_flight=2)], "sources": []},
        {
            "engines": [engine("a", served=5, prefilled=7, failed=2, in_flight=2), engine("b", state="down")],
            "sources": [],
        },
    ]
    shared = merge_engines(answers, shared=True)["engines"]
    assert [(each["id"], each["served"], each["in_flight"]) for each in shared] == [("a", 9, 2), ("b", 0, 0)]
    assert [each["failed"] for each in shared] == [3, 0]
    assert [each["prefilled"] for each in shared] == [13, 0]
    alone = merge_engines(answers, shared=False)["engines"]
    assert [(each["served"], each["in_flight"]) for each in alone] == [(9, 4), (0, 0)]


def test_of_an_engine_the_worker_tells_that_uses_it():
    answers = [{"engines": [engine("a", state="elsewhere")]}, {"engines": [engine("a", served=1)]}]
    (merged,) = merge_engines(answers, shared=True)["engines"]
    assert (merged["state"], merged["served"]) == ("ready", 1)


def test_requests_are_the_newest_of_all():
    answers = [{"requests": [{"started": 5}, {"started": 2}]}, {"requests": [{"started": 4}]}]
    assert merge_requests(answers, 2) == {"requests": [{"started": 5}, {"started": 4}], "passed_on": {}}


def use(day, tenant, requests):
    row = {"day": day, "tenant": tenant, "model": "m", "requests": requests, "failed": 0}
    return row | {"prompt_tokens": 2 * requests, "cached_tokens": 0, "output_tokens": 1}


def test_the_use_of_all_workers_is_added():
    answers = [
        {"usage": [use("2027-01-02", "b", 1), use("2027-01-01", None, 5)]},
        {"usage": [use("2027-01-02", "a", 1), use("2027-01-02", "b", 2)]},
    ]
    assert merge_use(answers) == {
        "usage": [
            use("2027-01-02", "a", 1),
            use("2027-01-02", "b", 3) | {"output_tokens": 2},
            use("2027-01-01", None, 5),
        ]
    }


def operation(number, state, *parts):
    return {"id": f"op-{number}", "state": state, "error": None, "engines": list(parts)}


def part(engine, state, done):
    return {"engine": engine, "state": state, "done": done}


def test_an_operation_of_all_is_what_was_done_on_each_engine():
    answers = [
        operation(1, "failed", part("a", "failed", 0), part("b", "done", 0)),
        operation(2, "done", part("a", "done", 3), part("b", "done", 2)),
    ]
    merged = merge_operation(answers)
    assert (merged["id"], merged["state"]) == ("op-1", "done")
    assert merged["engines"] == [part("a", "done", 3), part("b", "done", 2)]
    assert merge_operation([operation(1, "done"), operation(2, "running")])["state"] == "running"


async def test_statistics_and_snapshots_keep_their_shape():
    """The merged answer of two equal workers: like one of them, with its counts doubled."""
    async with FakeEngine("a") as engine, proxy_over(engine, reuse=True) as each:
        audit = each.fleet.engines["a"].audit
        audit.skip(Unchecked.NOT_FIRM)
        audit.reported(7)
        one = msgspec.to_builtins(await stats(each.fleet, [], reuse=True))
        both = merge_stats([one, one], shared=True)
        doubled = ("checked", "exact", "predicted_tokens", "reported_tokens", "cached_tokens")
        audits = [[pool["engines"][0]["audit"] for pool in told["pools"]] for told in (one, both)]
        for alone, together in zip(*audits, strict=True):
            twice = {name: 2 * alone[name] for name in doubled}
            assert together == {**alone, **twice, "unchecked": {"prediction not firm": 2}}
        assert (both["totals"]["predictions_unchecked"], both["totals"]["cached_tokens"]) == (
            {"prediction not firm": 2},
            14,
        )
        assert both.keys() == one.keys()
        assert both["totals"].keys() == one["totals"].keys()
        live = Live(each.fleet, Metrics(each.fleet), None, None, reuse=True)
        snapshot = msgspec.to_builtins(live.snapshot())
        merged = merge_snapshots([snapshot, snapshot], shared=True)
        assert merged.keys() == snapshot.keys()
        assert merged["engines"][0]["audit"]["unchecked"] == {"prediction not firm": 2}
        unserved = [{**snapshot, "unserved": models} for models in (["a", "m"], ["m"])]
        assert merge_snapshots(unserved, shared=True)["unserved"] == ["m"]  # one worker still serves a
