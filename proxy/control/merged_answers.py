"""Answers of the admin API by several workers as one. They are decoded JSON, in the shapes of the API.

With `shared`, each worker's load already counts the requests of all (`proxy/peers/`); without an exchange,
each knows only its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Json = dict[str, Any]
# The best first: what a worker says of an engine that another one uses counts less.
_STATES = ("ready", "suspect", "draining", "connecting", "down")
_PARTS = ("done", "running", "cancelled", "failed")


def merge_stats(answers: Sequence[Json], *, shared: bool) -> Json:
    """`GET /stats`."""
    pools = [
        _merge_pool(group, shared=shared)
        for group in _by("model", (pool for answer in answers for pool in answer["pools"]))
    ]
    known = {engine["id"] for pool in pools for engine in pool["engines"]}
    unconnected = _by("id", (each for answer in answers for each in answer["unconnected"]))
    rule = max if shared else sum
    totals = _merged(
        [answer["totals"] for answer in answers],
        {
            "engines": max,
            "ready": max,
            "elsewhere": min,
            "in_flight": rule,
            "served": sum,
            "failed": sum,
            "index_entries": max,
            "predictions_checked": sum,
            "predictions_exact": sum,
            "predictions_unchecked": _sums,
            "predicted_cached_tokens": sum,
            "reported_cached_tokens": sum,
            "cached_tokens": sum,
        },
    )
    return {
        **answers[0],
        "pools": pools,
        "unconnected": [group[0] for group in unconnected if group[0]["id"] not in known],
        "pins": [
            min(group, key=lambda pin: pin["kvpin"] is not None)  # the worker that holds it
            for group in _by("pin_id", (pin for answer in answers for pin in answer["pins"]))
        ],
        "totals": totals,
        "passed_on": _sums([answer["passed_on"] for answer in answers]),
    }


def _merge_pool(pools: Sequence[Json], *, shared: bool) -> Json:
    merged = _merged(pools, {"index_entries": max})
    known = [pool["tokenisation"] for pool in pools if pool["tokenisation"] is not None]
    if known:
        merged["tokenisation"] = _merged(known, {"agreed": sum, "differed": sum})
    engines = _by("id", (engine for pool in pools for engine in pool["engines"]))
    return {**merged, "engines": [_merge_engine(group, shared=shared) for group in engines]}


def _merge_engine(engines: Sequence[Json], *, shared: bool) -> Json:
    """One engine: what the worker says that uses it, with the counts of all."""
    ranked = _ranked(engines)
    ended = {name: sum(each[name] for each in ranked) for name in ("served", "prefilled", "failed")}
    merged = {**_merge_load(ranked, shared=shared), **ended}
    if "audit" in merged:
        merged["audit"] = _merge_audits(ranked)
        ahead = [each["restored_ahead"] for each in ranked]
        merged["restored_ahead"] = _merged(ahead, dict.fromkeys(ahead[0], sum))
        blocks = [each["blocks"] for each in ranked]
        merged["blocks"] = _merged(blocks, dict.fromkeys(blocks[0], max))
    return merged


def _merge_audits(engines: Sequence[Json]) -> Json:
    counts = ("checked", "exact", "predicted_tokens", "reported_tokens", "cached_tokens")
    rules: dict[str, Callable[[list[Any]], Any]] = {**dict.fromkeys(counts, sum), "unchecked": _sums}
    return _merged([each["audit"] for each in engines], rules)


def merge_engines(answers: Sequence[Json], *, shared: bool) -> Json:
    """`GET /engines`."""
    groups = _by("id", (engine for answer in answers for engine in answer["engines"]))
    return {**answers[0], "engines": [_merge_engine(group, shared=shared) for group in groups]}


def merge_requests(answers: Sequence[Json], limit: int) -> Json:
    """`GET /requests`: the newest of all, newest first. Those that one worker passed on to another are among
    them."""
    requests = [request for answer in answers for request in answer["requests"]]
    return {"requests": sorted(requests, key=lambda request: -request["started"])[:limit], "passed_on": {}}


def merge_use(answers: Sequence[Json]) -> Json:
    """`GET /usage`: the workers' counts together."""
    counts = ("requests", "failed", "prompt_tokens", "cached_tokens", "output_tokens")
    days: dict[tuple[str, str, str], list[Json]] = {}
    for row in (row for answer in answers for row in answer["usage"]):
        days.setdefault((row["day"], row["tenant"] or "", row["model"] or ""), []).append(row)
    merged = [_merged(days[key], dict.fromkeys(counts, sum)) for key in sorted(days)]
    return {"usage": sorted(merged, key=lambda row: str(row["day"]), reverse=True)}


def merge_operations(answers: Sequence[Json]) -> Json:
    """`GET /operations`: newest first."""
    operations = [operation for answer in answers for operation in answer["operations"]]
    return {"operations": sorted(operations, key=lambda operation: -operation["started"])}


def merge_operation(answers: Sequence[Json]) -> Json:
    """One operation that all workers carried out: for each engine, the part of the worker that did most."""
    groups = _by("engine", (part for answer in answers for part in answer["engines"]))
    parts = [min(group, key=lambda part: (_rank(_PARTS, part["state"]), -part["done"])) for group in groups]
    states = {part["state"] for part in parts} or {answer["state"] for answer in answers}
    worst = max(states, key=lambda state: _rank(_PARTS, state))
    like = next((answer for answer in answers if answer["state"] == worst), answers[0])
    return {**like, "id": answers[0]["id"], "engines": parts, "state": worst}


def merge_snapshots(snapshots: Sequence[Json], *, shared: bool) -> Json:
    """The `snapshot` of `GET /events`."""
    merged = _merged(snapshots, {"requests": sum, "unshown": sum})
    merged["reuse"] = _sums([each["reuse"] for each in snapshots])
    merged["waiting"] = _sums([each["waiting"] for each in snapshots])
    merged["unserved"] = sorted(set.intersection(*(set(each["unserved"]) for each in snapshots)))
    engines = []
    for group in _by("id", (engine for each in snapshots for engine in each["engines"])):
        reuse = _sums([engine["reuse"] for engine in group])
        ranked = _ranked(group)
        engines.append({**_merge_load(ranked, shared=shared), "reuse": reuse, "audit": _merge_audits(ranked)})
    return {**merged, "engines": engines}


def _ranked(engines: Sequence[Json]) -> list[Json]:
    return sorted(engines, key=lambda engine: _rank(_STATES, engine["state"]))


def _merge_load(engines: Sequence[Json], *, shared: bool) -> Json:
    return _merged(engines, dict.fromkeys(("in_flight", "decoding", "queue_s"), max if shared else sum))


def _rank(order: Sequence[str], value: str) -> int:
    return order.index(value) if value in order else len(order)


def _by(name: str, rows: Iterable[Json]) -> list[list[Json]]:
    """Rows with the same value of a field together."""
    groups: dict[str, list[Json]] = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return list(groups.values())


def _merged(rows: Sequence[Json], rules: dict[str, Callable[[list[Any]], Any]]) -> Json:
    """The first row, with these fields made of all rows."""
    return {**rows[0], **{name: rule([row[name] for row in rows]) for name, rule in rules.items()}}


def _sums(rows: Sequence[Json]) -> Json:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: sum(row.get(name, 0) for row in rows) for name in names}
