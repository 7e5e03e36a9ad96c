"""How much of recorded coding sessions finds its KV, if that of a tool call is evicted last for 10 s.

The slots are those of a llama-server without files; its own planner chooses them, once without and once with
what it knows of tool calls. The blocks are those of the embedded engine's own cache, without a host tier.
Requests come at their recorded times and take no time. A request counts as one whose answer called a tool if
the next of its session comes within 10 s.

    python benchmarks/tool_calls.py kvct_openloop_512.jsonl.gz [--sessions 24]

The trace has lines with `timestamp` in ms, `hash_ids` and `session_id`, as docs/replay.md describes.
"""

from __future__ import annotations

import argparse
import gzip
import json
from array import array
from pathlib import Path
from typing import Any

from engine_adapter.llama_server.plan import SlotRates, plan
from engine_adapter.llama_server.slots import SlotTable
from engine_adapter.torch_engine.kv_cache import KvCache, KvSequence
from engine_adapter.torch_engine.kv_tree import KvTree
from engine_adapter.types import TOOL_S, KvTarget, Retention


def read(path: Path, sessions: int) -> list[dict[str, Any]]:
    """The requests of the first sessions, each with the seconds until the next of its session."""
    with gzip.open(path) as file:
        requests = sorted(map(json.loads, file), key=lambda each: each["timestamp"])
    names = list(dict.fromkeys(each["session_id"] for each in requests))[:sessions]
    requests = [each for each in requests if each["session_id"] in names]
    after = dict[str, float]()
    for each in reversed(requests):
        next_ms = after.get(each["session_id"])
        each["gap_s"] = None if next_ms is None else (next_ms - each["timestamp"]) / 1000
        after[each["session_id"]] = each["timestamp"]
    return requests


def reused(requests: list[dict[str, Any]], n_slots: int, *, knows: bool) -> float:
    """The share of prompt tokens that lay in the chosen slot. A block of the trace stands for a token."""
    table, rates = SlotTable(n_slots), SlotRates()
    cached = total = 0
    for each in requests:
        now, prompt = each["timestamp"] / 1000, array("i", each["hash_ids"])
        chosen = plan(prompt, None, table, (), rates, now, can_save=False, can_restore=False)
        cached += chosen.cost.cached_tokens
        total += len(prompt)
        table.hold(chosen.slot, prompt, None)
        slot = table[chosen.slot]
        slot.since = now
        if knows and each["gap_s"] is not None and each["gap_s"] <= TOOL_S:
            slot.due_until = now + TOOL_S
    return cached / total


def reused_blocks(requests: list[dict[str, Any]], room: int, *, knows: bool) -> float:
    """The share of prompt tokens that lay in a cache of `room` blocks. A block of the trace is one here."""
    no_copies: Any = None  # there is no other tier
    tree = KvTree(gpu_blocks=room, host_blocks=0, tokens_per_block=1, copier=no_copies)
    cache = KvCache(tree, block_bytes=0, pin_share=0.0)
    cached = total = 0
    for each in requests:
        now, prompt = each["timestamp"] / 1000, array("i", each["hash_ids"])
        cache.expire(now)
        total += len(prompt)
        # The last token is always computed: one more, which is never stored.
        sequence = KvSequence(prompt + array("i", [0]), None, None)
        if not cache.begin(sequence):
            continue
        cached += sequence.computed
        cache.advance(sequence, len(prompt) - sequence.computed)
        cache.end(sequence)
        cache.tree.journal.drain()
        if knows and each["gap_s"] is not None and each["gap_s"] <= TOOL_S:
            cache.await_turn(KvTarget(prompt), Retention(1, TOOL_S), now)
    return cached / total


def main() -> None:
    """Prints a row for each number of slots, and for as many blocks as as many mean prompts have."""
    parser = argparse.ArgumentParser(description="What it is worth to know of tool calls.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--sessions", type=int, default=24)
    arguments = parser.parse_args()
    if not arguments.trace.exists():
        parser.error(f"{arguments.trace} is not there: see --help")
    requests = read(arguments.trace, arguments.sessions)
    calls = sum(each["gap_s"] is not None and each["gap_s"] <= TOOL_S for each in requests)
    print(f"{len(requests)} requests of {arguments.sessions} sessions, {calls} with a tool call")
    for n_slots in (4, 8, 12, 16):
        before, after = (reused(requests, n_slots, knows=knows) for knows in (False, True))
        print(f"{n_slots} slots: {before:.1%} of the tokens reused before, {after:.1%} after")
    mean = sum(len(each["hash_ids"]) for each in requests) // len(requests)
    for n_prompts in (2, 4, 8, 16):
        room = n_prompts * mean
        before, after = (reused_blocks(requests, room, knows=knows) for knows in (False, True))
        print(f"{room} blocks, {n_prompts} prompts: {before:.1%} reused before, {after:.1%} after")


if __name__ == "__main__":
    main()
