"""The operations of a slot on the shared server. Only slot 0 is used, and left empty."""

import pytest

from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.llama_server.discovery import read_slots
from engine_adapter.llama_server.slot_io import SlotIo
from engine_adapter.llama_server.state_file import read_tokens
from tests.fakes import FakeEngine

PROMPT = list(range(100, 164))
NAME = "kvpin-slot-io.bin"


@pytest.fixture
async def io(control, llama):
    io = SlotIo(control)
    await io.erase(0)
    yield io
    await io.erase(0)
    (llama.save_dir / NAME).unlink(missing_ok=True)


async def run(control: ControlClient, prompt=PROMPT):
    """Runs a prompt on slot 0; returns how many of its tokens were reused."""
    body = {"prompt": prompt, "n_predict": 1, "id_slot": 0, "cache_prompt": True, "temperature": 0}
    return (await control.call("POST", "/completion", json=body))["timings"]["cache_n"]


async def length(control):
    return (await read_slots(control))[0].n_tokens


async def test_a_save_is_the_file_it_says(io, control, llama):
    await run(control)
    moved = await io.save(0, NAME)
    path = llama.save_dir / NAME
    assert (moved.tokens, moved.size) == (len(PROMPT), path.stat().st_size)
    assert read_tokens(path).tolist() == PROMPT
    assert 0 < moved.seconds < 60
    assert await run(control) == len(PROMPT) - 1, "and the slot keeps what it holds"


async def test_a_restore_brings_it_back(io, control):
    await run(control)
    saved = await io.save(0, NAME)
    assert await io.erase(0) == len(PROMPT)
    assert await length(control) == 0
    moved = await io.restore(0, NAME)
    assert (moved.tokens, moved.size) == (saved.tokens, saved.size)
    assert 0 < moved.seconds < 60
    assert await run(control) == len(PROMPT) - 1


async def test_an_empty_slot_saves_and_erases_nothing(io):
    assert (await io.save(0, NAME)).tokens == 0
    assert await io.erase(0) == 0


async def test_a_restore_that_is_refused_has_wiped_its_slot(io, control):
    await run(control)
    with pytest.raises(EngineRejected) as refused:
        await io.restore(0, "no-such-file.bin")
    assert refused.value.status == 400
    assert await length(control) == 0


@pytest.mark.parametrize("name", ["../x", "", "a/b"])
async def test_a_name_that_is_none_is_refused(io, control, name):
    await run(control)
    with pytest.raises(EngineRejected):
        await io.save(0, name)
    assert await length(control) == len(PROMPT)


async def test_what_is_no_server_any_more_is_unavailable(control_of):
    async with FakeEngine() as gone:
        pass
    with pytest.raises(EngineUnavailable):
        await SlotIo(control_of(gone.url)).save(0, NAME)


@pytest.mark.parametrize("action", ["save", "restore", "erase"])
async def test_an_answer_that_is_not_understood_names_slot_and_action(control_of, action):
    async def script(exchange):
        assert (exchange.method, exchange.target) == ("POST", f"/slots/3?action={action}")
        await exchange.send({"id_slot": 3, "n_erased": "many", "n_saved": 1, "n_restored": 1})

    async with FakeEngine(script=script) as engine:
        io = SlotIo(control_of(engine.url))
        act = {"save": lambda: io.save(3, NAME), "restore": lambda: io.restore(3, NAME)}.get(
            action, lambda: io.erase(3)
        )
        with pytest.raises(EngineUnavailable, match=rf"/slots/3\?action={action}: .* not as expected"):
            await act()
