"""What trying out finds and costs, on real servers; test_discovery.py has what they tell."""

from __future__ import annotations

from dataclasses import replace

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from engine_adapter.llama_server.checkpoints import PLAIN, MemoryRules
from engine_adapter.llama_server.discovery import MemoryKind, discover, findings_of
from engine_adapter.llama_server.probe import memory_rules, probe
from engine_adapter.llama_server.slot_io import read_slots
from engine_adapter.types import EngineSpec
from scripts.make_gguf import gguf_path
from tests.engine_adapter.llama_server.test_discovery import FACTS
from tests.engines import served

FILE = "probe.bin"
SAVED = {"n_erased": 0, "n_saved": 0, "timings": {"save_ms": 1, "cache_n": 0}}


async def probed(control, slot_id, file=FILE):
    """What a probe of one of its slots finds."""
    facts = await discover(control, EngineSpec("llama_server", "http://127.0.0.1:1", "e"))
    return await probe(control, facts, slot_id, file=file)


async def test_a_probe_touches_its_slot_alone(start_llama, control_of, save_dir):
    control = control_of(start_llama(slots=2, save_dir=save_dir).url)
    prompt = {"prompt": list(range(500, 600)), "n_predict": 0}
    for slot_id in (0, 1):
        await control.call("POST", "/completion", json={**prompt, "id_slot": slot_id})
    facts = await probed(control, 1)
    assert (facts.ram_cache, facts.is_unified) == (False, False)
    reused = [
        (await control.call("POST", "/completion", json={**prompt, "id_slot": slot_id}))["timings"]["cache_n"]
        for slot_id in (0, 1)
    ]
    assert reused == [99, 0]


async def test_a_server_whose_save_directory_is_gone_is_used_without_saves(start_llama, control_of, tmp_path):
    save_dir = tmp_path / "kv"
    save_dir.mkdir()
    server = start_llama(slots=2, save_dir=save_dir)
    save_dir.rmdir()
    facts = await probed(control_of(server.url), 0)
    assert not facts.can_save
    assert "no prefix can be saved" in [*map(str, findings_of(facts))][-1]


@pytest.mark.parametrize("n_written", [0, 35, 40, 46, 4000])
async def test_a_file_of_unknown_size_tells_nothing(control_of, n_written):
    answer = JSONResponse(SAVED | {"n_written": n_written})
    routes = [Route(path, lambda _: answer, methods=["POST"]) for path in ("/slots/0", "/completion")]
    with served(Starlette(routes=routes)) as url:
        assert (await probe(control_of(url), FACTS, 0, file=FILE)).is_unified is None


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
    facts = await probed(control, 1)
    assert memory_rules(facts.kind, facts) == rules
    assert [file.name for file in save_dir.iterdir()] == [FILE]
    assert [slot.id_task is None for slot in await read_slots(control)] == [True, False]
    found = [str(each) for each in findings_of(replace(facts, memory=rules))]
    assert [each for each in found if "--swa-full" in each or "--ctx-checkpoints" in each] == found
    assert (flag is None) == (not found)
    assert flag is None or flag in found[0]


async def test_a_server_that_cannot_save_is_tried_out_too(start_llama, control_of):
    server = start_llama("--ctx-checkpoints", "0", model=gguf_path("swa"), slots=1, ctx=512)
    assert (await probed(control_of(server.url), 0)).kind == MemoryKind(
        is_recurrent=False, has_window=True, has_checkpoints=False, has_window_in_files=False
    )


@pytest.mark.parametrize("shape", ["tiny", "swa"])
async def test_beside_a_ram_cache_only_files_tell(start_llama, control_of, save_dir, shape):
    flags = ("--cache-ram", "64")
    server = start_llama(*flags, model=gguf_path(shape), slots=2, ctx=512, save_dir=save_dir)
    assert (await probed(control_of(server.url), 0)).kind == MemoryKind(
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
