"""What slots hold when that is not sure: nobody gets moved KV for exact, KV of another tenant,
or goes on behind a checkpoint of another prompt (`Checkpoint.is_stale`)."""

from __future__ import annotations

import asyncio
import json
from array import array
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain

import httpx
import pytest

from engine_adapter import EngineLost, EngineUnavailable, JsonBody, KvTarget, KvVerb
from engine_adapter.llama_server import slot_io
from engine_adapter.llama_server.checkpoints import PLAIN, UNPROBED
from engine_adapter.llama_server.discovery import memory_rules
from engine_adapter.llama_server.scheduler import SlotRequest
from scripts.make_gguf import gguf_path
from tests.engine_adapter.llama_server.scheduler_world import NEVER_SENT, scheduler_world
from tests.engine_adapter.llama_server.slot_world import START, prompt_of, slot_world

PROMPT = prompt_of(1, 300)


@pytest.fixture
async def alone(start_llama, save_dir):
    async with scheduler_world(start_llama(slots=1, ctx=1024, save_dir=save_dir)) as world:
        yield world


@pytest.fixture
async def pair(start_llama, save_dir):
    """A scheduler of a server with two slots, and a file of tenant a's: `pair.entry`."""
    async with scheduler_world(start_llama(slots=2, ctx=1024, save_dir=save_dir)) as world:
        world.entry = await world.saved_away(PROMPT, "a")
        yield world


@asynccontextmanager
async def unanswered(world, monkeypatch):
    """The question what a slot holds after the request of this block fails."""

    async def fails(_slot_id):
        raise EngineUnavailable("no answer")

    with monkeypatch.context() as patch:
        yield lambda: patch.setattr(world.scheduler, "_count_when_idle", fails)
        await world.idle()


async def reused_by_another(world):
    """Tokens that tenant b reuses of the prompt, on each slot."""
    leases = [asyncio.create_task(world.ask(PROMPT, "b")) for _ in world.table]
    return [(await lease).answer.cached_tokens for lease in leases]


async def test_a_slot_whose_predictions_keep_failing_is_not_firm(alone):
    """The answer that shows it carries the old rules back into its slot."""
    alone.contents.learn(replace(alone.facts, memory=replace(PLAIN, chunk=16)))
    parts = [list(prompt_of(seed, 60)) for seed in range(8)]
    # `ask` sends no n_cache_reuse: as on a server that cannot move KV.
    prompts = [array("i", [*START, *chain.from_iterable(parts[turn:])]) for turn in range(7)]
    leases = [await alone.ask(prompt) for prompt in prompts]
    wrong = [lease.answer.cached_tokens < lease.cached_tokens for lease in leases]
    assert wrong == [False, *[True] * 6]
    assert not alone.contents.rules.is_sure
    assert [lease.firm for lease in leases] == [*[True] * 4, *[False] * 3]


class TestNobodyElseGetsWhatATenantLeft:
    async def test_after_a_text_whose_end_is_not_known(self, alone, monkeypatch):
        """As of `/infill`, whose tokens kvpin does not know."""
        lease = alone.scheduler.lease(SlotRequest(array("i"), "a", text=array("i", [1, 2, 3])))
        async with unanswered(alone, monkeypatch) as fail, lease as held:
            await alone.complete(PROMPT, slot=held.slot)
            fail()
        assert await reused_by_another(alone) == [0]

    @pytest.mark.parametrize("streams", [False, True])
    async def test_after_an_answer_from_which_its_client_left_the_counts_out(
        self, start_llama, save_dir, streams
    ):
        server, path = start_llama(slots=1, ctx=1024, save_dir=save_dir), "/completion"
        fields = {"n_predict": 4, "stream": streams, "response_fields": ["tokens", "stop"]}
        async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
            async with world.hold(PROMPT, "a", path, **fields) as hold:
                async with await world.sent(hold, path) as response:
                    assert response.status == 200
                    hold.answer.feed(await response.read())
                hold.answer.finish()
            assert 0 not in await world.lengths()
            assert (await world.ask(PROMPT, "b"))[1:] == (0, 0)

    async def test_by_a_request_that_never_left(self, alone, monkeypatch):
        """The length of what lies there was a guess: that another one is found does not show that it ran."""
        lease = alone.scheduler.lease(SlotRequest(PROMPT, "a"))
        async with unanswered(alone, monkeypatch) as fail, lease as held:
            await alone.complete(PROMPT, slot=held.slot)  # its answer is lost
            fail()
        await alone.ask(PROMPT, "b", chunks=NEVER_SENT)
        assert await reused_by_another(alone) == [0]


class TestNobodyElseGetsWhatWasRestored:
    """`/slots` tells no tokens of a slot that had no request yet, even after a restore: that is not empty."""

    async def test_by_a_restore_without_an_answer(self, pair, monkeypatch):
        restore = slot_io.restore

        async def unanswered(*args):
            await restore(*args)
            raise EngineLost("no answer")

        with monkeypatch.context() as patch:
            patch.setattr(slot_io, "restore", unanswered)
            with pytest.raises(EngineLost):
                await pair.ask(PROMPT, "a")
        await pair.idle()
        assert await reused_by_another(pair) == [0, 0]

    async def test_for_a_request_that_never_left(self, pair):
        assert await pair.restore(1, pair.entry)
        assert (await pair.ask(pair.entry.tokens, "a", chunks=NEVER_SENT)).slot == 1
        assert await reused_by_another(pair) == [0, 0]

    async def test_for_a_request_that_the_server_refused(self, start_llama, save_dir):
        """Through the adapter: a tenant's own request that the server refuses (400) is enough."""
        before = start_llama(slots=2, ctx=1024, save_dir=save_dir)
        async with slot_world(before.url, host_cache_dir=str(save_dir)) as world:
            await world.ask(PROMPT, "a")
            await world.do(KvVerb.OFFLOAD)
        before.stop()
        server = start_llama(slots=2, ctx=1024, save_dir=save_dir)
        async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
            await world.ask(prompt_of(2, 300), "c")  # on the slot that was probed
            refused = world.hold(PROMPT, "a", grammar="root ::= (")
            async with refused as hold, await world.sent(hold) as response:
                assert response.status == 400
            await world.until_idle()
            assert (await world.ask(PROMPT, "b"))[1] == 0


async def test_the_end_of_a_pin_leaves_the_pin_of_another_engine_on_the_same_file(start_llama, save_dir):
    """Two servers share a directory, and so its saved prefixes."""
    servers = [start_llama(slots=1, ctx=1024, save_dir=save_dir) for _ in range(2)]
    async with (
        slot_world(servers[0].url, "one", host_cache_dir=str(save_dir)) as one,
        slot_world(servers[1].url, "two", host_cache_dir=str(save_dir)) as two,
    ):
        await one.ask(PROMPT)
        await one.do(KvVerb.OFFLOAD)
        mine = await one.adapter.pin(KvTarget(PROMPT), 100)
        await two.adapter.pin(KvTarget(PROMPT), 100)
        await one.adapter.unpin(mine.pin_id)
        done = await two.do(KvVerb.FLUSH, token_ids=PROMPT)
        assert done.left.get("pinned"), done


# --- checkpoints of another prompt ---------------------------------------------------------------------

NEW = prompt_of(2, 300)
END = prompt_of(9, 6)
# The server goes on at a checkpoint of one token, and that one is of another prompt.
WINDOW = [prompt_of(0, 6), prompt_of(0, 1) + prompt_of(1, 300), NEW, prompt_of(2, 1) + prompt_of(3, 40) + END]
STATE = [prompt_of(0, 5), NEW, prompt_of(2, 40) + END]
# At 50 and 51 tokens there are states; the second one stays when token 50 changes.
HEAD = prompt_of(0, 50)
LATER_STATE = [
    prompt_of(0, 54),
    prompt_of(0, 53) + prompt_of(1, 2),
    HEAD + prompt_of(2, 1500),
    HEAD + prompt_of(2, 250) + END,
]
STALE = [("swa", WINDOW), ("linear", STATE), ("conv", STATE)]


async def right_of(start_llama, shape, prompts, *flags):
    """What a server says to the last prompt if it reuses nothing; a bare one says something else."""
    server = start_llama(*flags, model=gguf_path(shape), slots=1, ctx=4096)
    asked = {"n_predict": 12, "temperature": 0, "n_probs": 1, "id_slot": 0}
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as client:

        async def ask(prompt, *, reuse):
            body = asked | {"prompt": prompt.tolist(), "cache_prompt": reuse}
            return (await client.post("/completion", json=body)).json()

        alone = [await ask(prompt, reuse=True) for prompt in prompts][-1]
        right = await ask(prompts[-1], reuse=False)
    assert alone["timings"]["cache_n"] > 0
    assert alone["completion_probabilities"] != right["completion_probabilities"], "or it proves nothing"
    return right["content"]


@pytest.mark.parametrize(("shape", "prompts"), [("swa", WINDOW), ("linear", LATER_STATE)])
async def test_nothing_goes_on_behind_a_checkpoint_of_another_prompt(start_llama, shape, prompts):
    right = await right_of(start_llama, shape, prompts)
    server = start_llama(model=gguf_path(shape), slots=1, ctx=4096)
    async with slot_world(server.url) as world:
        await world.ask(prompt_of(8, 300))  # computed whole: its checkpoints are known
        for prompt in prompts[:-1]:
            await world.ask(prompt)
        assert await world.ask(prompts[-1], max_tokens=12) == (right, 0, 0)


@pytest.mark.parametrize(("shape", "prompts"), STALE)
async def test_nor_behind_a_text_whose_tokens_are_unknown(start_llama, shape, prompts):
    right = await right_of(start_llama, shape, prompts)
    server = start_llama(model=gguf_path(shape), slots=1, ctx=4096)
    async with slot_world(server.url) as world:
        for prompt in (prompt_of(8, 300), *prompts[:-2]):
            await world.ask(prompt)
        body = {"prompt": prompts[-2].tolist(), "max_tokens": 1, "temperature": 0}
        untold = JsonBody(json.dumps(body).encode()), KvTarget()
        async with world.adapter.hold("/v1/completions", *untold) as hold:
            await world.answer(hold)
        assert (await world.ask(prompts[-1], max_tokens=12))[0] == right


@pytest.mark.parametrize("shape", ["linear", "conv"])
async def test_nor_where_the_server_is_tried_out_while_a_request_runs(start_llama, save_dir, shape):
    """What the server's memory is, is learned while the request runs on another slot."""
    right = await right_of(start_llama, shape, STATE)
    server = start_llama(model=gguf_path(shape), slots=1, ctx=4096, save_dir=save_dir)
    async with scheduler_world(server) as world:
        kind = world.facts.kind
        world.contents.learn(replace(world.facts, memory=UNPROBED))
        await world.ask(STATE[0])
        async with world.scheduler.lease(SlotRequest(STATE[1])) as lease:
            await world.send(lease)
            world.contents.learn(replace(world.facts, memory=memory_rules(kind, world.facts)))
        await world.idle()
        lease = await world.ask(STATE[-1], max_tokens=12)
    assert "".join(lease.answer.pieces) == right


@pytest.mark.parametrize("shape", ["linear", "conv", "swa"])
@pytest.mark.parametrize("size", [128, 256])
async def test_nor_on_a_server_whose_batches_are_not_the_default(start_llama, save_dir, shape, size):
    """`-ub N` puts a checkpoint of one token into a prompt of N + 5 tokens; kvpin expects it for 512."""
    prompts = [prompt_of(0, size + 5), prompt_of(2, 700), prompt_of(2, 40) + END]
    right = await right_of(start_llama, shape, prompts, "-ub", str(size))
    flags = {"model": gguf_path(shape), "slots": 1, "ctx": 4096, "save_dir": save_dir}
    async with slot_world(start_llama("-ub", str(size), **flags).url) as world:
        for prompt in prompts[:-1]:
            await world.ask(prompt)
        assert (await world.ask(prompts[-1], max_tokens=12))[0] == right
