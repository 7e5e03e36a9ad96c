"""What a real vLLM with a hybrid model reused of each prompt is what its events make kvpin predict."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import msgspec
import pytest

from engine_adapter.events.keys import read_vllm_keys
from engine_adapter.events.wire import EventReader
from engine_adapter.types import ViewCurrent, ViewLost, token_array
from engine_adapter.vllm.event_watch import Copies
from proxy.core.index.blocks import chain, namespace_root
from proxy.core.index.prefix_index import PrefixIndex
from proxy.core.index.view import EngineView, slices
from proxy.core.placement.decision import predict

DATA = Path(__file__).parent / "data" / "hybrid_events"
POOL, BLOCK = 16, 32  # tokens of a block of kvpin's and of vLLM's


def recorded(shape):
    """The lines of a recording, in order; bytes as bytes."""

    def restore(fields):
        return bytes.fromhex(fields["__bytes__"]) if fields.keys() == {"__bytes__"} else fields

    with gzip.open(DATA / f"{shape}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line, object_hook=restore) for line in lines]


def replay(lines):
    """What was predicted and what full attention alone holds, beside what was reused, of each request."""
    root, index, reader = namespace_root("m"), PrefixIndex(), EventReader(read_vllm_keys)
    index.add_engine("e")
    view = EngineView("e", index, lambda salt, lora: namespace_root("m", lora=lora, salt=salt), POOL)
    copies, seen = Copies(), []

    def take(*events):
        for event in events:
            for counted in copies.count(event):
                for part in slices(counted):
                    view.apply(part)

    take(ViewLost("connected"), ViewCurrent(complete=True))
    for line in lines:
        if "events" in line:
            take(*reader.read(msgspec.msgpack.encode([0.0, line["events"], None])))
            continue
        asked = chain(root, token_array(line["asked"]), None, POOL)
        match = index.match(asked.hashes, asked.reusable).get("e")
        blocks, cut = (match.blocks, match.cut) if match is not None else (0, 0)
        held = predict(asked, blocks + cut, BLOCK)
        seen.append((predict(asked, blocks, BLOCK), line["cached"], held))
    groups = index.groups_of("e")
    assert groups is not None
    assert groups.is_known
    assert reader.skipped == 0
    return seen


@pytest.mark.parametrize("shape", ["gemma3", "gpt-oss"])
def test_predicted_is_reused(shape):
    seen = replay(recorded(shape))
    assert [predicted for predicted, _, _ in seen] == [cached for _, cached, _ in seen]
    assert sum(cached > 0 for _, cached, _ in seen) > len(seen) // 4
    # The other groups shorten what full attention holds, of some prompts.
    assert sum(held > cached for _, cached, held in seen) > len(seen) // 20
