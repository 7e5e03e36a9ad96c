"""What trying out finds and costs; tests/engine_adapter/llama_server/test_discovery.py has what is found."""

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from engine_adapter.errors import EngineUnavailable
from engine_adapter.llama_server.discovery import discover, findings_of, probe, probe_ram_cache, probe_unified
from engine_adapter.types import EngineSpec
from tests.engines import served

FILE = "probe.bin"
SAVED = {"n_erased": 0, "n_saved": 0, "timings": {"save_ms": 1}}


async def test_probes_touch_their_slot_alone(start_llama, control_of, save_dir):
    control = control_of(start_llama(slots=2, save_dir=save_dir).url)
    prompt = {"prompt": list(range(500, 600)), "n_predict": 0}
    for slot_id in (0, 1):
        await control.call("POST", "/completion", json={**prompt, "id_slot": slot_id})
    assert await probe_ram_cache(control, 1) is False
    assert await probe_unified(control, 1, 2, file=FILE) is False
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
    facts = await discover(control_of(server.url), EngineSpec("llama_server", server.url, "e"))
    facts = await probe(control_of(server.url), facts, 0, file=FILE)
    assert not facts.can_save
    assert "no prefix can be saved" in [*map(str, findings_of(facts))][-1]


async def test_a_server_that_tells_no_timings(control_of):
    app = Starlette(routes=[Route("/completion", lambda _: JSONResponse({}), methods=["POST"])])
    with served(app) as url, pytest.raises(EngineUnavailable, match="timings"):
        await probe_ram_cache(control_of(url), 0)


@pytest.mark.parametrize("n_written", [0, 35, 40, 46, 4000])
async def test_a_file_of_unknown_size_tells_nothing(control_of, n_written):
    app = Starlette(
        routes=[Route("/slots/0", lambda _: JSONResponse(SAVED | {"n_written": n_written}), methods=["POST"])]
    )
    with served(app) as url:
        assert await probe_unified(control_of(url), 0, 4, file=FILE) is None


async def test_a_save_that_does_not_tell_its_size(control_of):
    app = Starlette(routes=[Route("/slots/0", lambda _: JSONResponse(SAVED), methods=["POST"])])
    with served(app) as url, pytest.raises(EngineUnavailable, match="n_written"):
        await probe_unified(control_of(url), 0, 4, file=FILE)
