"""What trying out the memory of real servers finds, and the rules that follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_adapter.llama_server.checkpoints import PLAIN, MemoryRules
from engine_adapter.llama_server.discovery import discover, findings_of
from engine_adapter.llama_server.memory_probe import MemoryKind, memory_rules, probe_memory
from engine_adapter.llama_server.slot_io import read_slots
from engine_adapter.types import EngineSpec
from scripts.make_gguf import gguf_path

WINDOW = MemoryKind(is_recurrent=False, has_window=True, has_checkpoints=True, has_window_in_files=True)


@pytest.mark.parametrize(("shape", "flags", "rules", "flag"), [
    ("tiny", (), PLAIN, None),
    ("swa", (), MemoryRules(512, window=128), "--swa-full"),
    ("sinks", (), MemoryRules(512, window=128), "--swa-full"),
    ("swa", ("--swa-full",), replace(PLAIN, loses_window=True), None),
    ("linear", (), MemoryRules(512, is_recurrent=True), None),
    ("conv", (), MemoryRules(512, is_recurrent=True), None),
    ("linear", ("--ctx-checkpoints", "0"), MemoryRules(512, is_recurrent=True, most=0), "--ctx-checkpoints"),
])  # fmt: skip
async def test_the_memory_of_a_server_is_found_out(
    start_llama, control_of, save_dir, shape, flags, rules, flag
):
    server = start_llama(*flags, model=gguf_path(shape), slots=2, ctx=512, save_dir=save_dir)
    control = control_of(server.url)
    facts = await discover(control, EngineSpec("llama_server", server.url, "e"))
    kind = await probe_memory(control, 1, 2, file="probe.bin")
    assert memory_rules(kind, facts) == rules
    assert [file.name for file in save_dir.iterdir()] == ["probe.bin"]
    assert [slot.id_task is None for slot in await read_slots(control)] == [True, False]
    found = [str(each) for each in findings_of(replace(facts, memory=memory_rules(kind, facts)))]
    assert [each for each in found if "--swa-full" in each or "--ctx-checkpoints" in each] == found
    assert (flag is None) == (not found)
    assert flag is None or flag in found[0]


async def test_a_server_that_cannot_save_is_tried_out_too(start_llama, control_of):
    server = start_llama("--ctx-checkpoints", "0", model=gguf_path("swa"), slots=1, ctx=512)
    kind = await probe_memory(control_of(server.url), 0, 1, file=None)
    assert kind == MemoryKind(
        is_recurrent=False, has_window=True, has_checkpoints=False, has_window_in_files=False
    )


@pytest.mark.parametrize("shape", ["tiny", "swa"])
async def test_beside_a_ram_cache_only_files_tell(start_llama, control_of, save_dir, shape):
    flags = ("--cache-ram", "64")
    server = start_llama(*flags, model=gguf_path(shape), slots=2, ctx=512, save_dir=save_dir)
    kind = await probe_memory(control_of(server.url), 0, 2, file="probe.bin", ram_cache=True)
    assert kind == MemoryKind(
        is_recurrent=False, has_window=False, has_checkpoints=True, has_window_in_files=shape == "swa"
    )


async def test_a_window_that_no_file_tells_is_a_guess(start_llama, control_of, tmp_path):
    server = start_llama(slots=1)
    facts = await discover(control_of(server.url), EngineSpec("llama_server", server.url, "e"))
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    for model in (None, other, tmp_path / "none.gguf", gguf_path("tiny")):
        rules = memory_rules(WINDOW, replace(facts, local_model=model))
        assert (rules.window, rules.is_sure) == (1024, False)
