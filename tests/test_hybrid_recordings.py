"""What real vLLMs and SGLangs with hybrid models reused is what their events make kvpin predict."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from engine_adapter.events.fields import read_sglang_keys, read_vllm_keys
from engine_adapter.events.wire import EventReader
from engine_adapter.sglang.windows import Windows
from engine_adapter.types import ViewCurrent, ViewLost, token_array
from engine_adapter.vllm.copies import Copies
from proxy.core.index.blocks import chain, namespace_root
from proxy.core.index.view import EngineView, slices
from proxy.core.placement.placer import Placer
from proxy.core.placement.scores import predict

DATA = Path(__file__).parent / "data" / "hybrid_events"
POOL, BLOCK, PAGE = 16, 32, 16  # tokens of a block of kvpin's and of vLLM's, and of a page of SGLang's


def recorded(shape):
    """The lines of a recording, in order; bytes as bytes."""

    def restore(fields):
        return bytes.fromhex(fields["__bytes__"]) if fields.keys() == {"__bytes__"} else fields

    with gzip.open(DATA / f"{shape}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line, object_hook=restore) for line in lines]


@dataclass(frozen=True, slots=True)
class Seen:
    """A request: the tokens predicted, those reused, and those that full attention alone holds. `checked`:
    kvpin would compare the first two."""

    predicted: int
    cached: int
    held: int
    checked: bool


def replay(lines, blocks=None, windows=None):
    """The requests, placed on one engine of so many blocks: a vLLM, or an SGLang with these windows."""
    reader = EventReader(read_vllm_keys if windows is None else read_sglang_keys)
    counted, size = (Copies().count, BLOCK) if windows is None else (windows.follow, PAGE)
    root, placer = namespace_root("m"), Placer(POOL)
    placer.add("e", tokens_per_block=size, gpu_blocks=blocks)
    view = EngineView("e", placer.index, lambda salt, lora: namespace_root("m", lora=lora, salt=salt), POOL)
    running, seen = {}, []

    def take(*events):
        for event in events:
            for each in counted(event):
                for part in slices(each):
                    view.apply(part)

    take(ViewLost("connected"), ViewCurrent(complete=True))
    for now, line in enumerate(lines):
        if "events" in line:
            take(*reader.read(msgspec.msgpack.encode([0.0, line["events"], None])))
        elif "asked" in line:
            tokens = token_array(line["asked"])
            asked = chain(root, tokens, None, POOL)
            if windows is not None:
                windows.asked(tokens)
            placement = placer.place(now, [placer.candidate(now, "e", placer.match(asked).get("e"))], asked)
            running[line["id"]] = placement, placer.begin(now, "e", placement.work, asked)
        else:
            placement, placed = running.pop(line["answered"])
            cached, predicted = line["cached"], placement.predicted_tokens
            placer.end(now, placed, placement.n_tokens - cached)
            placer.settled(placed)
            held = predict(placed.chain, (predicted + placement.cut_tokens) // POOL, size)
            seen.append(
                Seen(predicted, cached, held, placement.firm and not (placed.may_be_evicted and predicted))
            )
    groups = placer.index.groups_of("e")
    assert groups is not None
    assert groups.is_known
    assert reader.skipped == 0
    return seen


@pytest.mark.parametrize(
    ("shape", "windows"),
    [("gemma3", None), ("gpt-oss", None), ("sglang-mellum", Windows(128, PAGE, None))],
    ids=["gemma3", "gpt-oss", "an SGLang, which does not tell of its windows"],
)
def test_predicted_is_reused(shape, windows):
    seen = replay(recorded(shape), windows=windows)
    assert [each.predicted for each in seen] == [each.cached for each in seen]
    assert all(each.checked for each in seen)
    assert sum(each.cached > 0 for each in seen) > len(seen) // 4
    # The other groups shorten what full attention holds, of some prompts.
    assert sum(each.held > each.cached for each in seen) > len(seen) // 20


def test_of_four_at_a_time_all_that_are_checked_are_exact():
    """The others may have lost what they were to reuse to those beside them, which need more blocks than
    there are."""
    seen = replay(recorded("gemma3-four"), 420)
    checked = [each for each in seen if each.checked]
    assert len(checked) > len(seen) // 3
    assert [each.predicted for each in checked] == [each.cached for each in checked]
    assert sum(each.predicted != each.cached for each in seen) >= 5
