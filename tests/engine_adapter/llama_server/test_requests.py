"""Requests of every shape and tenant on the slots of a llama-server."""

from __future__ import annotations

import json
from array import array

import pytest

from engine_adapter import JsonBody, KvTarget, KvVerb
from engine_adapter.errors import EngineRejected
from tests.engine_adapter.llama_server.slot_world import LONG, PATH, SHORTER, START, prompt_of, slot_world


class TestRequests:
    async def test_a_body_is_pinned_and_streamed_and_else_as_it_was(self, world):
        async with world.hold(prompt_of(1), seed=7, id_slot="nonsense") as hold:
            assert hold.body.get("id_slot") in (0, 1)
            assert (hold.body.get("stream"), hold.body.get("seed")) == (True, 7)
            assert hold.body.get("stream_options") == {"include_usage": True}
            assert hold.answer.assembles
        async with world.hold(prompt_of(1), stream=True) as hold:
            assert hold.body.get("stream_options") is None
            assert not hold.answer.assembles

    async def test_no_other_request_comes_on_the_connection_of_a_stream(self, world):
        """The server closes it after the stream, when the next request may be under way."""
        for body, closes in (({"stream": True}, True), ({}, False)):
            raw = JsonBody(json.dumps(body).encode())
            headers = dict(world.adapter.prepare("POST", PATH, {}, raw).headers)
            assert (headers.get(b"connection") == b"close") is closes

    @pytest.mark.parametrize("path", ["/v1/completions", "/completion"])
    async def test_a_text_goes_as_its_token_ids(self, world, path, control_of):
        body = JsonBody(b'{"prompt": "Hello there", "temperature": 0, "max_tokens": 4, "n_predict": 4}')
        ids = await world.adapter.tokenize("/v1/completions", body)
        straight = await control_of(world.server.url).call("POST", path, json=json.loads(body.raw))
        async with world.adapter.hold(path, body, KvTarget(ids, exact=True)) as hold:
            assert hold.body.get("prompt") == ids.tolist()
            answer = await world.answer(hold, path)
        for name in ("content", "prompt", "tokens_evaluated", "stop_type"):
            assert answer.get(name) == straight.get(name)
        if path == "/v1/completions":
            assert answer["choices"] == straight["choices"]
            assert answer["usage"]["prompt_tokens"] == straight["usage"]["prompt_tokens"]

    @pytest.mark.parametrize("exact", [False, True])
    async def test_a_chat_and_ids_that_are_not_proved_stay_as_they_are(self, world, exact):
        path = "/v1/chat/completions" if exact else "/v1/completions"
        body = JsonBody(b'{"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hello"}')
        async with world.adapter.hold(path, body, KvTarget(prompt_of(1), exact=exact)) as hold:
            assert hold.body.get("prompt") == "Hello"

    async def test_a_stream_ends_with_its_client_also_where_it_names_a_conversation(self, world):
        named = {"content-type": "application/json", "x-conversation-id": "c"}
        sent = world.adapter.prepare("POST", "/v1/completions", named, None).headers
        assert b"x-conversation-id" not in dict(sent)
        assert dict(sent)[b"content-type"] == b"application/json"

    async def test_who_wants_no_reuse_gets_none(self, world):
        await world.ask(prompt_of(1))
        assert (await world.ask(prompt_of(1), cache_prompt=False))[1:] == (0, 0)

    async def test_a_prompt_nobody_knows_leaves_a_slot_nobody_knows(self, world):
        async with world.hold(None) as hold:
            await world.answer(hold)
        await world.until_idle()
        assert sorted((s["tokens"] > 0, s["unknown"] > 0) for s in await world.slots()) == [
            (False, False),
            (True, True),
        ]
        assert (await world.ask(array("i", [1, 2, 3])))[1:] == (0, 0)

    @pytest.mark.parametrize("flags", [(), ("--cache-reuse", "32")])
    async def test_kv_is_never_moved_to_another_place(self, start_llama, save_dir, flags):
        """A server that is asked to move it reuses more, answers otherwise, and so do all requests after."""
        server = start_llama(*flags, slots=1, ctx=1024, save_dir=save_dir)
        async with slot_world(server.url) as world:
            text, *_ = await world.ask(SHORTER, max_tokens=24, cache_prompt=False)
            await world.ask(LONG, cache_prompt=False)
            assert await world.ask(SHORTER, max_tokens=24, n_cache_reuse=16) == (text, 60, 60)
            assert await world.ask(SHORTER, max_tokens=24) == (text, 359, 359)

    @pytest.mark.parametrize("asked", [{}, {"n_cache_reuse": 0}, {"n_cache_reuse": 1000}])
    async def test_unless_the_engines_owner_allows_it(self, start_llama, save_dir, asked):
        server = start_llama(slots=1, ctx=1024, save_dir=save_dir)
        told = []
        async with slot_world(server.url, host_cache_dir=str(save_dir), cache_reuse=16) as world:
            for prompt in (LONG, SHORTER, SHORTER, START):
                forecast = world.adapter.forecast(KvTarget(prompt))
                async with world.hold(prompt, **asked) as hold:
                    await world.answer(hold)
                    assert hold.body.get("n_cache_reuse") == 16
                    assert hold.answer.cached_tokens() == hold.cached_tokens == forecast.cached_tokens
                    told.append((hold.cached_tokens, hold.note.startswith("not exact: ")))
            (finding,) = world.adapter.findings()
        assert told == [(0, False), (359, True), (359, True), (59, False)]
        assert "answers that use moved KV are not exact" in str(finding)

    async def test_what_was_moved_is_never_taken_for_exact(self, start_llama, save_dir):
        """By a kvpin that moves no KV, on the same server and directory, nor by another server."""
        server, other, bare = (
            start_llama(slots=1, ctx=1024, save_dir=each) for each in (save_dir, save_dir, None)
        )
        directory = {"host_cache_dir": str(save_dir)}
        async with slot_world(bare.url) as world:
            exact, *_ = await world.ask(SHORTER, max_tokens=24)
        async with slot_world(server.url, cache_reuse=16, **directory) as world:
            await world.ask(LONG, max_tokens=1)
            moved, cached, _ = await world.ask(SHORTER, max_tokens=24)
            assert (moved != exact, cached) == (True, 359), "or the rest would prove nothing"
            await world.until(lambda slots: slots[0]["saved"] == slots[0]["tokens"])
        for url, said in ((server.url, 0), (other.url, 359)):  # at last, from an exact file
            async with slot_world(url, **directory) as world:
                assert await world.ask(SHORTER, max_tokens=24) == (exact, said, said)
        async with slot_world(server.url, cache_reuse=16, **directory) as world:
            assert await world.ask(SHORTER, max_tokens=24) == (moved, 359, 359)

    async def test_the_kv_of_an_adapter_is_not_that_of_its_tokens(self, world):
        await world.ask(prompt_of(1))
        assert (await world.ask(prompt_of(1), lora=[{"id": 0, "scale": 1.0}]))[2] == 0
        await world.until_idle()
        assert sum(slot["unknown"] > 0 for slot in await world.slots()) == 1

    @pytest.mark.parametrize(
        "fields",
        [
            {"n": 2},
            {"n_cmpl": 3},
            {"n": 1, "n_cmpl": 2},
            {"prompt": ["Hello there", "Good day"]},
            {"prompt": [[5], [7]]},
        ],
    )
    async def test_what_would_become_several_requests_gets_no_slot(self, world, fields):
        """kvpin splits it before: the server would choose the slots."""
        with pytest.raises(EngineRejected, match="one prompt and one answer at a time") as caught:
            async with world.hold(prompt_of(2), **fields):
                pass
        assert caught.value.status == 400
        assert {slot["operation"] for slot in await world.slots()} == {None}

    @pytest.mark.parametrize(
        "fields", [{"n": 1, "n_cmpl": None}, {"prompt": ["Hello"]}, {"prompt": [5, "a"]}]
    )
    async def test_what_stays_one_request_gets_a_slot(self, world, fields):
        async with world.hold(prompt_of(2), **fields) as hold:
            assert hold.slot in (0, 1)

    async def test_a_forecast_has_the_prices_of_the_pool(self, world):
        world.adapter.priced_by(lambda tokens: 7.0 * tokens, lambda idle_s: 0.0)
        for seed in range(4):
            await world.ask(prompt_of(seed))
        cost = world.adapter.forecast(KvTarget(prompt_of(9)))
        assert cost.prefill_s == 700.0
        world.adapter.priced_by(lambda tokens: 7.0 * tokens, lambda idle_s: 1.0)
        assert world.adapter.forecast(KvTarget(prompt_of(9))).regret_s > cost.regret_s
        registry, facts = world.adapter._registry, world.adapter._session.facts
        assert registry.rates[facts.key].prefill_s(1) == 7.0, "files have the same prices"


class TestTenants:
    async def test_no_salt_shares_with_another(self, world):
        tokens = prompt_of(1)
        for salt in ("a", "b", None, "c", "d"):
            assert (await world.ask(tokens, salt=salt))[1:] == (0, 0)

    async def test_nor_by_files(self, world):
        tokens = prompt_of(1)
        await world.ask(tokens, salt="a")
        await world.do(KvVerb.OFFLOAD)
        assert (await world.ask(tokens, salt="b"))[1:] == (0, 0)
        assert (await world.ask(tokens, salt="a"))[1:] == (99, 99)

    async def test_salts_are_not_written_down(self, world, save_dir):
        await world.ask(prompt_of(1), salt="tenant-secret")
        await world.do(KvVerb.OFFLOAD)
        assert (await world.files()) != []
        assert not [path for path in save_dir.iterdir() if b"tenant-secret" in path.read_bytes()]


async def test_a_body_that_is_no_json_is_left_alone(world):
    async def chunks():
        yield b"x"

    body = chunks()
    async with world.adapter.hold("/v1/audio/transcriptions", body, None) as hold:
        assert hold.body is body
    async with world.adapter.hold("/v1/embeddings", JsonBody(b'{"input": "x"}'), None) as hold:
        assert hold.body.get("id_slot") is None
