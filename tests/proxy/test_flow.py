"""The read path over real sockets: retries, salts, aliases, and nothing left behind."""

import asyncio
import gc
import json
from array import array
from dataclasses import replace
from typing import ClassVar

import httpx
import pytest
import structlog

from engine_adapter import (
    EngineRejected,
    EngineUnavailable,
    EngineUnreachable,
    Forecast,
    Hold,
    JsonBody,
    ViewCurrent,
)
from proxy.core import life
from proxy.core.audit import Unchecked
from proxy.core.index.view import EngineView
from proxy.core.placement.demand import MIN_UTILISATION
from proxy.fleet.engine import EngineState, order_name
from proxy.request.calls import Session
from proxy.request.tenants import ApiKey, Tenants
from proxy.steps.preparation import Ready
from tests.fakes import (
    ASK,
    CHAT,
    DONE,
    INFO,
    STREAM,
    asked,
    client_of,
    connect_to,
    event,
    give_prompts,
    is_openai_error,
    post,
    prompts_of,
    proxy_over,
)
from tests.holding import HoldingAdapter, Reader
from tests.scripts import EVENTS, dies, hangs, sends, streams

LONG = {"model": "m", "messages": [{"role": "user", "content": "What is the weather in Paris today? " * 8}]}


TWO = Tenants([ApiKey.of(name, name) for name in ("red", "blue")])
BY = {name: {"authorization": f"Bearer {name}"} for name in ("red", "blue")}


def bodies():
    return sum(type(each) is JsonBody for each in gc.get_objects())


class TestRetries:
    @pytest.fixture
    def adapters(self, engine, other):
        return [engine, other]

    async def test_a_refused_connection_goes_to_the_other_engine(self, engine, other, client):
        await engine.stop()
        response = await client.post(CHAT, json=ASK)
        assert (response.status_code, response.headers["x-kvpin-engine"]) == (200, "b")
        assert client.proxy.last.attempts == ["a", "b"]
        assert client.proxy.fleet.engines["a"].state == "suspect"
        assert client.proxy.fleet.engines["a"].check_now.is_set()

    @pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
    async def test_so_does_a_refusal(self, engine, other, client, status):
        engine.script = sends({"message": "full"}, status=status)
        body = b'{"model":"m", "messages":[]}'
        response = await client.post(CHAT, content=body)
        assert response.headers["x-kvpin-engine"] == "b"
        assert len(engine.seen) == 1
        assert other.seen[0].body == body
        engines = client.proxy.fleet.engines
        assert engines["a"].state == "ready"
        assert [(each.served, each.failed) for each in engines.values()] == [(0, 1), (1, 0)]

    async def test_a_body_that_all_engines_refuse_is_let_go_at_once(self, engine, other, client):
        """Not when the garbage collector comes by: many of them could fill the memory until then."""
        engine.script = other.script = sends({"message": "full"}, status=503)
        gc.collect()
        gc.disable()
        try:
            before = bodies()
            response = await client.post(CHAT, json=ASK)
            await client.proxy.settled()
            assert bodies() == before
        finally:
            gc.enable()
        assert response.status_code == 503

    @pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
    @pytest.mark.parametrize("headers", [None, EVENTS], ids=["before its head", "after"])
    async def test_one_that_hangs_and_is_lost_is_replaced(self, engine, other, client, body, headers):
        engine.script = hangs(headers=headers)
        asked = asyncio.create_task(client.post(CHAT, json=body))
        exchange = await engine.request()
        await asyncio.sleep(0.02)
        client.proxy.fleet.engines["a"].abandon()
        response = await asked
        assert (response.status_code, response.headers["x-kvpin-engine"]) == (200, "b")
        assert client.proxy.last.attempts == ["a", "b"]
        await asyncio.wait_for(exchange.left.wait(), 30)
        assert not client.proxy.fleet.engines["a"].unanswered

    async def test_an_answer_that_has_begun_ends_with_its_engine(self, engine, other, client, monkeypatch):
        monkeypatch.setattr(life, "SILENCE_S", 0.02)
        engine.script, got = hangs(b"data: 1\n\n"), b""
        async with client.stream("POST", CHAT, json=STREAM) as response:
            with pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012 - the loop is what breaks
                async for chunk in response.aiter_raw():
                    got += chunk
                    client.proxy.fleet.engines["a"].state = EngineState.DOWN
                    client.proxy.fleet.engines["a"].abandon()
        error = json.loads(got.removeprefix(b"data: 1").strip().removeprefix(b"data: "))["error"]
        assert (error["type"], error["message"]) == ("server_error", "the engine was lost in mid-answer")
        await asyncio.wait_for(engine.seen[0].left.wait(), 30)
        assert client.proxy.last.error == error["message"]
        assert (client.proxy.fleet.engines["a"].leases, other.seen) == (set(), [])

    async def test_when_all_are_gone_it_is_a_502_not_to_be_repeated(self, engine, other, client):
        await engine.stop()
        await other.stop()
        for _ in range(2):  # the second time, both are suspect and asked all the same
            response = await client.post(CHAT, json=ASK)
            assert is_openai_error(response, 502, "engine_failed")
            assert response.headers["x-should-retry"] == "false"
            assert client.proxy.last.attempts == ["a", "b"]

    async def test_a_request_that_broke_two_connections_is_tried_on_no_third(self):
        async with asked(*[dies(headers=None)] * 3) as (proxy, client, *_):
            response = await client.post(CHAT, json=ASK)
            assert is_openai_error(response, 502, "engine_failed")
            assert response.headers["x-should-retry"] == "false"
            assert proxy.last.attempts == ["a", "b"]
            assert proxy.fleet.engines["c"].state == "ready"

    async def test_a_body_is_kept_until_no_engine_can_get_it_any_more(
        self, engine, other, client, monkeypatch
    ):
        bodies, kept = [], Ready.body_for

        def note(ready, engine):
            bodies.append(kept(ready, engine))
            assert client.proxy.bodies.used > 0
            return bodies[-1]

        monkeypatch.setattr(Ready, "body_for", note)
        await engine.stop()
        other.script = hangs(event("1"))
        async with client.stream("POST", CHAT, json=STREAM) as response:
            async for _ in response.aiter_raw():
                break
            assert {len(body.raw) for body in bodies if hasattr(body, "raw")} == set()
            assert len(bodies) >= 1
            assert client.proxy.bodies.used == 0
        await client.proxy.settled()


class TestPassedOn:
    """Routes that not all kinds of engines have: a client must not notice which engine was asked first."""

    FORM: ClassVar = {"content-type": "multipart/form-data; boundary=b"}

    @pytest.fixture
    def adapters(self, engine, other):
        return [engine, other]

    @staticmethod
    def lacks(status):
        return sends({"detail": "Not Found"}, status=status)

    @pytest.mark.parametrize("status", [404, 405, 501])
    async def test_an_engine_without_the_route_is_left_out(self, engine, other, client, status):
        engine.script = self.lacks(status)
        for _ in range(4):
            response = await client.post("/v1/embeddings", json={"model": "m", "input": "x"})
            assert (response.status_code, response.headers["x-kvpin-engine"]) == (200, "b")
        assert (len(engine.seen), len(other.seen)) == (1, 4)

    async def test_an_upload_cannot_be_sent_again_but_teaches_where_the_next_one_goes(
        self, engine, other, client
    ):
        async def upload():
            return await client.post("/v1/audio/transcriptions", content=b"--b--", headers=self.FORM)

        engine.script, other.script = self.lacks(404), sends({"text": "heard"})
        assert [(await upload()).status_code for _ in range(3)] == [404, 200, 200]
        await other.stop()
        assert is_openai_error(await upload(), 502, "engine_failed")
        assert len(engine.seen) == 1

    async def test_if_no_engine_has_it_the_client_is_told_which_route(self, engine, other, client):
        engine.script = other.script = self.lacks(404)
        response = await client.post("/v1/embeddings", json={"model": "m", "input": "x"})
        assert is_openai_error(response, 404)
        assert response.json()["error"]["message"] == (
            "Not Found: no engine that was asked has the route /v1/embeddings"
        )


class TestWaiting:
    """No engine takes requests, and one may soon."""

    @pytest.fixture
    def proxy_options(self):
        return {"wait_s": 60}

    async def test_a_request_waits_for_an_engine_to_become_ready(self, proxy, client):
        engine = proxy.fleet.engines["a"]
        proxy.fleet.leave(engine)
        engine.state = EngineState.DOWN
        asked = [asyncio.create_task(client.post(CHAT, json=ASK)) for _ in range(2)]
        await asyncio.sleep(0.05)
        proxy.fleet.join(engine, INFO)
        engine.state = EngineState.READY
        responses = await asyncio.wait_for(asyncio.gather(*asked), 30)
        assert [response.status_code for response in responses] == [200, 200]

    async def test_nor_for_an_engine_that_drains(self, proxy, client):
        proxy.fleet.engines["a"].state = EngineState.DRAINING
        response = await asyncio.wait_for(client.post(CHAT, json=ASK), 30)
        assert is_openai_error(response, 503, "no_engine")
        assert "try again shortly" in response.text, "it may leave, and another take its place"
        proxy.fleet.book.drain(order_name(proxy.fleet.engine("a").adapter.spec), drained=True, now=1.0)
        response = await asyncio.wait_for(client.post(CHAT, json=ASK), 30)
        assert is_openai_error(response, 503, "no_engine")
        assert "all engines that serve this model are drained" in response.text
        assert "try again" not in response.text


class TestRecords:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_the_parts_of_the_time_to_the_first_byte_add_up(self, engine, proxy, client, stream):
        timings = {"prompt_n": 9, "prompt_ms": 0.002, "predicted_ms": 0.001}
        said = {"message": {"content": "x"}, "delta": {"content": "x"}}
        chunk = {"choices": [said], "usage": {"completion_tokens": 1}, "timings": timings}
        engine.script = streams(event(chunk), DONE) if stream else sends(chunk)
        assert (await client.post(CHAT, json={**ASK, "stream": stream})).status_code == 200
        record, parts = proxy.last, proxy.last.first_byte_parts
        assert record.came < record.arrived < record.prepared < record.placed
        assert sum(parts.values()) == pytest.approx(record.placed + record.first_byte_s - record.came)
        assert parts["prefill"] == pytest.approx(2e-6)
        assert ("decode" in parts) is not stream
        assert {"read", "tokenise", "place", "engine"} <= parts.keys()

    async def test_tenants_that_use_one_request_id_have_a_record_each(self, engine):
        async with proxy_over(engine, tenants=TWO) as proxy, client_of(proxy) as client:
            for headers in BY.values():
                await client.post(CHAT, json=ASK, headers=headers | {"x-request-id": "same"})
            red, blue = proxy.requests
            assert red.client_request_id == blue.client_request_id == "same"
            assert red.request_id != blue.request_id


class TestReuse:
    """Prompts are ready token ids, so that no tokenizer is needed."""

    @pytest.fixture
    def adapters(self, engine, other):
        engine.script = other.script = self.report(0)
        return [engine, other]

    @pytest.fixture
    def proxy_options(self):
        return {"reuse": True}

    @staticmethod
    def report(cached):
        usage = {"prompt_tokens_details": {"cached_tokens": cached}}
        return sends({"choices": [{"text": "x"}], "usage": usage})

    @staticmethod
    async def ask(client, start, n=40, **more):
        body = {"model": "m", "prompt": list(range(start, start + n)), **more}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.headers["x-kvpin-engine"], int(response.headers["x-kvpin-predicted-tokens"])

    async def test_a_prompt_returns_to_the_engine_that_served_it(self, proxy, client):
        first, predicted = await self.ask(client, 0)
        assert predicted == 0
        second, _ = await self.ask(client, 1000)
        assert second != first, "other prompts go elsewhere"
        for _ in range(3):
            assert await self.ask(client, 0) == (first, 32)
        assert await self.ask(client, 0, 100) == (first, 32)
        assert await self.ask(client, 0, 100) == (first, 96)

    async def test_engines_that_make_other_tokens_get_their_own_prompt_and_are_found_again(
        self, proxy, client
    ):
        give, engines = proxy.fleet.pools["m"].render, proxy.fleet.engines
        give(engines["b"], prompts_of(INFO), is_proven=True)
        first, _ = await self.ask(client, 0)
        second, _ = await self.ask(client, 1000)
        assert {first, second} == {"a", "b"}
        assert await self.ask(client, 0) == (first, 32)
        assert await self.ask(client, 1000) == (second, 32)

    async def test_an_engine_that_is_not_compared_yet_gets_no_ids_made_here_and_no_firm_prediction(
        self, proxy, client
    ):
        pool, holds = proxy.fleet.pools["m"], []
        for engine in pool.engines.values():
            engine.is_proven = False
            own = engine.adapter.hold
            engine.adapter.hold = lambda path, body, kv, own=own: (holds.append(kv), own(path, body, kv))[1]
        await self.ask(client, 0)
        assert holds[0].exact, "these are the client's own"
        assert not proxy.last.placement.firm

    async def test_a_request_that_waits_while_its_engine_changes_is_prepared_again(self, proxy, client):
        pool, made = proxy.fleet.pools["m"], []
        for engine in pool.engines.values():
            engine.state = EngineState.CONNECTING
        asking = asyncio.create_task(self.ask(client, 0))
        while not proxy.flow.fleet._an_engine_is_ready._waiters:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        new = prompts_of(INFO)
        build, new.build = new.build, lambda *args, **more: (made.append(1), build(*args, **more))[1]
        give_prompts(pool, new)
        pool.engines["a"].state = EngineState.READY
        assert await asking == ("a", 0)
        assert made == [1]

    async def test_a_session_breaks_ties_even_of_prompts_nobody_knows(self, proxy, client):
        homes = []
        for session in ("s", "t", "t", "s", None):
            headers = {"x-session-id": session} if session else {}
            response = await client.post("/v1/embeddings", json={"input": "x"}, headers=headers)
            homes.append(response.headers["x-kvpin-engine"])
            await proxy.settled()
        assert homes == ["a", "b", "b", "a", "b"]
        assert [record.session and record.session.name for record in proxy.requests] == [*"stts", None]

    async def test_reports_are_held_against_predictions(self, engine, proxy, client):
        proxy.fleet.engines["b"].state = EngineState.DOWN
        audit = proxy.fleet.engines["a"].audit
        await self.ask(client, 0)
        assert (audit.view().checked, audit.view().exact) == (1, 1)
        engine.script = self.report(16)
        await self.ask(client, 0)
        engine.script = self.report(100)
        await client.post("/v1/completions", json={"prompt": "a text, and no tokenizer"})
        seen = audit.view()
        assert (seen.checked, seen.predicted_tokens, seen.reported_tokens) == (2, 32, 16)
        assert (seen.unchecked, seen.cached_tokens) == ({Unchecked.PROMPT_UNKNOWN: 1}, 116)

    async def test_a_miss_after_an_eviction_is_no_evidence(self, engine, proxy, client):
        proxy.fleet.engines["b"].state = EngineState.DOWN
        mine = proxy.fleet.engines["a"]
        await self.ask(client, 0)
        mine.view = EngineView("a", proxy.fleet.pools["m"].index, lambda _salt, _adapter: 0, 16)
        mine.view.apply(ViewCurrent())

        async def script(exchange):
            mine.view.counts.removed += 1
            await self.report(0)(exchange)

        engine.script = script
        await self.ask(client, 0)
        assert (mine.audit.view().checked, mine.audit.view().exact) == (2, 1)
        assert mine.audit.view().recent_miss_share == 0

    async def test_an_engine_with_healthy_events_is_not_learned_from(self, proxy, client):
        for engine in proxy.fleet.engines.values():
            engine.audit.synced()
        await self.ask(client, 0)
        await proxy.settled()
        assert len(proxy.fleet.pools["m"].index) == 0

    async def test_a_prompt_beyond_the_context_is_refused_with_the_fields_of_the_engine(
        self, engine, proxy, client
    ):
        def too_long(tokens, limit):
            return {"type": "too_big", "had": tokens, "most": limit}

        give_prompts(proxy.fleet.pools["m"], prompts_of(replace(INFO, max_model_len=30, too_long=too_long)))
        response = await client.post("/v1/completions", json={"model": "m", "prompt": list(range(40))})
        assert (response.status_code, response.json()["error"]) == (
            400,
            {
                "message": "this model's context is 30 tokens; the prompt has 40 tokens",
                "type": "too_big",
                "param": "prompt",
                "code": "context_length_exceeded",
                "had": 40,
                "most": 30,
            },
        )
        assert not engine.seen
        assert "context" in proxy.last.error


class TestAdapters:
    """LoRA adapters, named as models. Engine `b` alone serves one."""

    @pytest.fixture
    def adapters(self, engine, other):
        return [engine, HoldingAdapter(other, info=replace(INFO, loras=frozenset({"ada"})))]

    @pytest.fixture
    def proxy_options(self):
        return {"reuse": True}

    async def test_its_requests_go_where_it_is_served_under_its_name(self, other, client):
        for path, body in ((CHAT, ASK), ("/v1/embeddings", {"input": "x"})):
            response = await client.post(path, json={**body, "model": "ada"})
            assert (response.status_code, response.headers["x-kvpin-engine"]) == (200, "b")
            assert other.seen[-1].json == {**body, "model": "ada"}

    async def test_records_and_metrics_name_it(self, proxy, client):
        await TestReuse.ask(client, 0, model="ada", prompt_cache_key="k")
        assert (proxy.last.model, proxy.last.prompt.lora) == ("ada", "ada")
        assert proxy.requests.last_prompt("k", None) == ("ada", proxy.last.prompt)
        counted = 'kvpin_requests_total{engine="b",model="ada",status="200"} 1.0'
        assert counted in proxy.metrics.render().decode()

    async def test_without_an_engine_that_is_ready_it_is_a_503_that_names_it(self, engine, proxy, client):
        proxy.fleet.engines["b"].state = EngineState.DRAINING
        response = await client.post(CHAT, json={**ASK, "model": "ada"})
        assert is_openai_error(response, 503, "no_engine")
        assert "LoRA adapter 'ada'" in response.json()["error"]["message"]
        proxy.fleet.leave(proxy.fleet.engines["b"])
        assert is_openai_error(await client.post(CHAT, json={**ASK, "model": "ada"}), 503, "no_engine")
        proxy.fleet.remove(proxy.fleet.engine("b"))
        response = await client.post(CHAT, json={**ASK, "model": "ada"})
        assert is_openai_error(response, 404, "model_not_found", "model")
        assert not engine.seen

    async def test_it_keeps_its_name_where_the_model_has_an_alias(self, other):
        info = replace(INFO, loras=frozenset({"ada"}))
        async with (
            proxy_over(HoldingAdapter(other, info=info, model="alias"), reuse=True) as proxy,
            client_of(proxy) as client,
        ):
            for name in ("ada", "alias"):
                await client.post(CHAT, json={**ASK, "model": name})
        assert [exchange.json["model"] for exchange in other.seen] == ["ada", "m"]


class TestTokensThatEnginesTell:
    """Some answers tell the prompt as the engine tokenised it."""

    @pytest.fixture
    async def a(self, engine):
        return HoldingAdapter(engine)

    @pytest.fixture
    async def proxy(self, a, tokenizer_dir):
        async with proxy_over(a, reuse=True) as proxy:
            info = replace(INFO, tokenizer=str(tokenizer_dir))
            give_prompts(proxy.fleet.pools["m"], prompts_of(info))
            yield proxy
            await proxy.settled()

    @pytest.fixture
    async def prompt(self, proxy):
        body = JsonBody(json.dumps(LONG).encode())
        return await proxy.fleet.pools["m"].prompts.build(CHAT, body, salt=None)

    async def test_the_same_are_counted(self, a, proxy, client, prompt):
        a.make = lambda body: Hold(body, answer=Reader(tokens=prompt.token_ids))
        await client.post(CHAT, json=LONG)
        assert (proxy.last.tokens_agree, proxy.fleet.pools["m"].prompts.agreed) == (True, 1)
        await proxy.settled()
        assert len(proxy.fleet.pools["m"].index) > 0

    async def test_others_are_told_once_and_neither_learned_nor_held_against_the_view(
        self, a, proxy, client, prompt
    ):
        ids = array("i", [*prompt.token_ids[:2], 7, *prompt.token_ids[3:]])
        a.make = lambda body: Hold(body, answer=Reader(tokens=ids))
        with structlog.testing.capture_logs() as logs:
            for _ in range(2):
                assert (await client.post(CHAT, json=LONG)).status_code == 200
        (log,) = [log for log in logs if "tokens" in log["event"]]
        assert (log["engine"], log["difference"]) == (
            "a",
            f"token 2: kvpin made {prompt.token_ids[2]}, the engine 7",
        )
        assert proxy.last.tokens_agree is False
        await proxy.settled()
        pool = proxy.fleet.pools["m"]
        assert (len(pool.index), pool.prompts.differed, pool.prompts.exactness.ok) == (0, 2, False)
        assert proxy.fleet.engines["a"].audit.view().checked == 0
        name = 'kvpin_tokenisation_checks_total{engine="a",model="m",result="different"} 2.0'
        assert name in proxy.metrics.render().decode()

    async def test_an_engine_whose_answers_do_not_tell_is_asked_about_the_first_of_each_form(
        self, a, proxy, client, prompt
    ):
        asked = []

        async def tokenize(path, body):
            asked.append((path, body.get("messages")))
            return prompt.token_ids[len(asked) == 1 :]

        a.tokenize = tokenize
        for _ in range(18):
            await client.post(CHAT, json=LONG)
        assert asked == [(CHAT, LONG["messages"])] * 16
        prompts = proxy.fleet.pools["m"].prompts
        assert (prompts.agreed, prompts.differed, proxy.last.tokens_agree) == (15, 1, None)


class TestMedia:
    """Clients' names of images, and prompts of which only the text before an image is known."""

    CAT, DOG = (
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        for data in ("Y2F0", "ZG9n")
    )

    @staticmethod
    def chat(*parts, **fields):
        messages = [{"role": "system", "content": "word " * 100}, {"role": "user", "content": [*parts]}]
        return {"model": "m", "messages": messages, **fields}

    @pytest.mark.parametrize("reuse", [False, True])
    async def test_whose_salts_an_engine_may_hold_kv_under(self, engine, reuse):
        """Prompts that nobody here can tokenise leave KV all the same: a tenant's flush must reach it."""
        async with proxy_over(engine, tenants=TWO, reuse=reuse) as proxy, client_of(proxy) as client:
            for fields in ({}, {"cache_salt": "x"}):
                await client.post(CHAT, json={**ASK, **fields}, headers=BY["red"])
            salts = proxy.fleet.engines["a"].salts
            assert salts.of("red") == {TWO.salt("red", None), TWO.salt("red", "x")}
            assert salts.of("blue") == frozenset()

    async def test_the_text_before_an_image_is_followed_and_nothing_rests_on_it(self, engine, tokenizer_dir):
        a = HoldingAdapter(engine)
        async with proxy_over(a, reuse=True) as proxy, client_of(proxy) as client:
            info = replace(INFO, tokenizer=str(tokenizer_dir))
            give_prompts(proxy.fleet.pools["m"], prompts_of(info))
            tokens = array("i", [1, 2, 3])
            a.make = lambda body: Hold(body, answer=Reader(cached=500, tokens=tokens))
            for part in (self.CAT, self.DOG):
                assert (await client.post(CHAT, json=self.chat(part))).status_code == 200
                await proxy.settled()
            assert proxy.last.prompt.whole is False
            assert proxy.last.placement.predicted_tokens > 16
            # The adapter is not told of it, and neither the report nor the tokens are held against it.
            assert a.asked == [(CHAT, None)] * 2
            assert (proxy.last.tokens_agree, proxy.fleet.engines["a"].audit.view().checked) == (None, 0)


class TestHold:
    """The adapter holds the engine while a request runs. Prompts are ready token ids."""

    PROMPT = "/v1/completions"
    BODY = {"model": "m", "prompt": list(range(40))}  # noqa: RUF012 - read only

    @pytest.fixture
    async def a(self, engine):
        return HoldingAdapter(engine)

    @pytest.fixture
    async def b(self, other):
        return HoldingAdapter(other)

    @pytest.fixture
    def adapters(self, a, b):
        return [a, b]

    @pytest.fixture
    def proxy_options(self):
        return {"reuse": True}

    @pytest.mark.parametrize("firm", [True, False])
    async def test_what_it_knows_better_is_the_prediction(self, a, proxy, client, firm):
        a.make = lambda body: Hold(body, cached_tokens=32, firm=firm)
        response = await client.post(self.PROMPT, json=self.BODY)
        assert response.headers["x-kvpin-predicted-tokens"] == "32"
        assert response.headers.get("x-kvpin-prediction") == (None if firm else "not-firm")
        placement = proxy.last.placement
        assert (placement.engine, placement.predicted_tokens, placement.firm) == ("a", 32, firm)
        assert proxy.last.is_firm is firm
        assert placement.costs[0].cached_tokens == 0, "what it was placed by stays as it was"
        audit = proxy.fleet.engines["a"].audit.view()
        assert (audit.checked, audit.exact) == (int(firm), int(firm))

    async def test_its_note_is_told_unless_its_engine_failed(self, a, engine, proxy, client):
        a.make = lambda body: Hold(body, note="it ran alone")
        response = await client.post(self.PROMPT, json=self.BODY)
        assert response.headers["x-kvpin-note"] == proxy.last.note == "it ran alone"
        await engine.stop()
        response = await client.post(self.PROMPT, json=self.BODY)
        assert response.headers["x-kvpin-engine"] == "b"
        assert ("x-kvpin-note" in response.headers, proxy.last.note) == (False, "")

    async def test_it_ends_before_another_engine_is_tried(self, a, engine, b, other, client):
        async def script(exchange):
            assert a.ended == [EngineUnreachable]
            await exchange.send({"choices": [{"text": "x"}]})

        await engine.stop()
        other.script = script
        b.make = lambda body: Hold(body, cached_tokens=16)
        response = await client.post(self.PROMPT, json=self.BODY)
        assert response.headers["x-kvpin-engine"] == "b"
        assert response.headers["x-kvpin-predicted-tokens"] == "16"
        assert (a.ended, b.ended) == ([EngineUnreachable], [None])
        assert client.proxy.fleet.engines["a"].audit.view().unchecked == {Unchecked.FAILED: 1}

    @pytest.mark.parametrize("error", [EngineUnavailable("no slot"), EngineRejected("no", status=500)])
    async def test_where_it_is_not_to_be_had_another_engine_is_tried(self, a, engine, b, client, error):
        def make(body):
            raise error

        a.make = make
        response = await client.post(self.PROMPT, json=self.BODY)
        assert (response.status_code, response.headers["x-kvpin-engine"]) == (200, "b")
        assert (engine.seen, b.ended) == ([], [None])

    @pytest.mark.parametrize("stream", [False, True])
    async def test_it_ends_when_the_client_leaves(self, a, engine, proxy, stream):
        engine.script = hangs(b"data: 1\n\n") if stream else hangs(headers=None)
        reader, writer = await connect_to(proxy)
        writer.write(post(self.PROMPT, json.dumps({**self.BODY, "stream": stream}).encode()))
        if stream:
            await reader.readuntil(b"data: 1")
        else:
            await engine.request()
        assert a.ended == []
        writer.close()
        await asyncio.wait_for(a.one_ended.wait(), 30)
        assert a.ended == [asyncio.CancelledError]
        await proxy.settled()
        assert proxy.fleet.engines["a"].audit.view().unchecked == {Unchecked.ENDED_EARLY: 1}

    @pytest.mark.parametrize(
        ("asked", "priority", "session"),
        [
            ({}, 0, None),
            ({"prompt_cache_retention": "24h"}, 1, None),
            ({"prompt_cache_key": "mine"}, 0, Session(None, "mine").digest),
        ],
    )
    async def test_the_engine_is_told_how_long_to_keep_it_and_whose_it_is(
        self, a, client, asked, priority, session
    ):
        await client.post(self.PROMPT, json={**self.BODY, **asked})
        ((_, prompt),) = a.asked
        assert (prompt.retention.priority, prompt.session) == (priority, session)

    @pytest.mark.parametrize(
        ("retains", "ttl", "told"), [(True, "30m", "1800"), (False, "30m", "0"), (True, None, None)]
    )
    async def test_the_client_is_told_whether_it_is_kept(self, a, b, client, retains, ttl, told):
        a.make = b.make = lambda body: Hold(body, retains=retains)
        answer = await client.post(self.PROMPT, json={**self.BODY, "prompt_cache_options": {"ttl": ttl}})
        assert answer.headers.get("x-kvpin-retention") == told

    async def test_a_forecast_decides_where_it_goes(self, a, b, proxy, client):
        a.foreseen = Forecast(cached_tokens=39, wait_s=3.0)
        b.foreseen = Forecast(cached_tokens=5, firm=False, prefill_s=1.0)
        response = await client.post(self.PROMPT, json=self.BODY)
        assert response.headers["x-kvpin-engine"] == "b"
        assert response.headers["x-kvpin-predicted-tokens"] == "5"
        placement = proxy.last.placement
        assert [cost.total_s for cost in placement.costs] == pytest.approx([3.0, 1.0 / (1 - MIN_UTILISATION)])
        assert not placement.firm
        assert proxy.fleet.engines["b"].audit.view().checked == 0


class TestDiagnostics:
    """Why a prompt missed, in the answer, for those who name an earlier answer. More of it: tests/live."""

    SAID: ClassVar = {"choices": [{"text": "x"}], "output": [], "content": []}

    @pytest.fixture
    async def client(self, engine):
        async def script(exchange):
            await exchange.send({**self.SAID, "id": f"resp_{len(engine.seen)}"})

        engine.script = script
        async with proxy_over(engine, tenants=TWO) as proxy, client_of(proxy) as client:
            client.proxy = proxy
            yield client

    async def ask(self, client, tenant="red", **options):
        body = {"model": "m", "input": "x"} | ({"prompt_cache_options": options} if options else {})
        return (await client.post("/v1/responses", json=body, headers=BY[tenant])).json()

    async def test_a_chat_is_found_by_its_id(self, client):
        async def chat(headers=(), **fields):
            return (await client.post(CHAT, json=ASK | fields, headers={**BY["red"], **dict(headers)})).json()

        async def compared_with(name):
            answer = await chat({"x-kvpin-compare-with": name})
            return answer["prompt_cache_diagnostics"]

        assert await chat() == {**self.SAID, "id": "resp_1"}
        assert client.proxy.last.answer_id == "resp_1"
        answer = await chat(prompt_cache_options={"comparison_response_id": "resp_1"})
        assert answer["prompt_cache_diagnostics"]["kvpin"]["reason"] == "not_followed"
        assert (await compared_with("resp_1"))["kvpin"]["reason"] == "not_followed"
        assert await compared_with("resp_9") == {"type": "comparison_response_not_found"}

    async def test_a_wrong_field_is_the_clients_fault(self, engine, client):
        answer = await client.post(CHAT, json=ASK | {"prompt_cache_options": 3}, headers=BY["red"])
        assert is_openai_error(answer, 400, "invalid_value", "prompt_cache_options")
        assert (client.proxy.last.status, client.proxy.last.cause, engine.seen) == (400, "invalid", [])
        assert b'kvpin_request_ends_total{cause="invalid"} 1' in client.proxy.metrics.render()

    @pytest.mark.parametrize("fields", [{"metadata": {"a": "b"}}, {"prompt_cache_key": "k"}])
    async def test_a_chat_that_names_the_cache_is_told_what_it_got(self, engine, client, fields):
        engine.script = sends({**self.SAID, "usage": {"prompt_tokens": 50}})
        usage = (await client.post(CHAT, json=ASK | fields, headers=BY["red"])).json()["usage"]
        assert ("prompt_tokens_details" in usage) is ("prompt_cache_key" in fields)

    async def test_the_body_is_kept_for_comparison_and_the_record_says_whose_it_is(self, client):
        await self.ask(client)
        record = client.proxy.last
        assert client.proxy.requests.sources.fields(record.request_id, "red") == {"input": "x"}
        assert client.proxy.requests.sources.fields(record.request_id, "blue") is None
