"""The read path over real sockets: retries, salts, aliases, and nothing left behind."""

import asyncio
import gc
import json
import time
from array import array
from contextlib import asynccontextmanager
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
from proxy.core.life import Rules
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
    FakeEngine,
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

LONG = {"model": "m", "messages": [{"role": "user", "content": "What is the weather in Paris today? " * 8}]}


def bodies():
    """Request bodies in memory."""
    return sum(type(each) is JsonBody for each in gc.get_objects())


class TestRetries:
    @pytest.fixture
    async def client(self, engine, other):
        async with proxy_over(engine, other) as proxy, client_of(proxy) as client:
            client.proxy = proxy
            yield client
            await proxy.settled()

    async def test_a_refused_connection_goes_to_the_other_engine(self, engine, other, client):
        await engine.stop()
        response = await client.post(CHAT, json=ASK)
        assert (response.status_code, response.headers["x-kvpin-engine"]) == (200, "b")
        assert client.proxy.last.attempts == ["a", "b"]
        assert client.proxy.fleet.engines["a"].state == "suspect"
        assert client.proxy.fleet.engines["a"].check_now.is_set()

    @pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
    async def test_so_does_a_refusal(self, engine, other, client, status):
        async def script(exchange):
            await exchange.send({"message": "full"}, status=status)

        engine.script = script
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

        async def script(exchange):
            await exchange.send({"message": "full"}, status=503)

        engine.script = other.script = script
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
    @pytest.mark.parametrize("point", ["before headers", "after headers"])
    async def test_so_does_a_death_before_the_first_byte(self, engine, other, client, point, body):
        async def script(exchange):
            if point == "after headers":
                kind = "text/event-stream" if "stream" in body else "application/json"
                await exchange.start(headers=[("content-type", kind)])
                await asyncio.sleep(0.02)
            exchange.die(abort=point == "before headers")

        engine.script = script
        response = await client.post(CHAT, json=body)
        assert (response.status_code, response.headers["x-kvpin-engine"]) == (200, "b")
        assert (len(engine.seen), len(other.seen)) == (1, 1)

    @pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
    @pytest.mark.parametrize("has_begun", [False, True])
    async def test_one_that_hangs_and_is_lost_is_replaced(self, engine, other, client, body, has_begun):
        async def script(exchange):
            if has_begun:
                await exchange.start()
            reached.set()
            await exchange.left.wait()
            left.set()

        engine.script = script
        reached, left = asyncio.Event(), asyncio.Event()
        asked = asyncio.create_task(client.post(CHAT, json=body))
        await asyncio.wait_for(reached.wait(), 5)
        await asyncio.sleep(0.02)
        client.proxy.fleet.engines["a"].abandon()
        response = await asked
        assert (response.status_code, response.headers["x-kvpin-engine"]) == (200, "b")
        assert client.proxy.last.attempts == ["a", "b"]
        await asyncio.wait_for(left.wait(), 5)
        assert not client.proxy.fleet.engines["a"].unanswered

    async def test_an_answer_that_has_begun_ends_with_its_engine(self, engine, other, client, monkeypatch):
        monkeypatch.setattr(life, "SILENCE_S", 0.02)

        async def script(exchange):
            await exchange.start()
            await exchange.chunk(b"data: 1\n\n")
            await exchange.left.wait()
            left.set()

        engine.script = script
        left = asyncio.Event()
        got = b""
        async with client.stream("POST", CHAT, json=STREAM) as response:
            with pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012 - the loop is what breaks
                async for chunk in response.aiter_raw():
                    got += chunk
                    client.proxy.fleet.engines["a"].state = EngineState.DOWN
                    client.proxy.fleet.engines["a"].abandon()
        error = json.loads(got.removeprefix(b"data: 1").strip().removeprefix(b"data: "))["error"]
        assert (error["type"], error["message"]) == ("server_error", "the engine was lost in mid-answer")
        await asyncio.wait_for(left.wait(), 5)
        assert client.proxy.last.error == error["message"]
        assert (client.proxy.fleet.engines["a"].leases, other.seen) == (set(), [])

    async def test_an_answer_that_goes_on_outlives_a_failed_health_check(self, engine, client, monkeypatch):
        monkeypatch.setattr(life, "SILENCE_S", 0.05)

        async def script(exchange):
            await exchange.start()
            for _ in range(10):
                await exchange.chunk(b"data: 1\n\n")
                await asyncio.sleep(0.02)
            await exchange.chunk(DONE)
            await exchange.end()

        engine.script = script
        async with client.stream("POST", CHAT, json=STREAM) as response:
            chunks = response.aiter_bytes()
            text = await anext(chunks)
            client.proxy.fleet.engines["a"].abandon()
            text += b"".join([chunk async for chunk in chunks])
        assert text == b"data: 1\n\n" * 10 + DONE

    async def test_when_all_are_gone_it_is_a_502_not_to_be_repeated(self, engine, other, client):
        await engine.stop()
        await other.stop()
        for _ in range(2):  # the second time, both are suspect and asked all the same
            response = await client.post(CHAT, json=ASK)
            assert is_openai_error(response, 502, "engine_failed")
            assert response.headers["x-should-retry"] == "false"
            assert client.proxy.last.attempts == ["a", "b"]

    async def test_when_all_refuse_the_last_one_is_quoted(self, engine, other, client):
        async def script(exchange):
            await exchange.send({"error": {"message": "queue full", "code": 429}}, status=429)

        engine.script = other.script = script
        response = await client.post(CHAT, json=ASK)
        assert is_openai_error(response, 429)
        assert response.json()["error"]["message"] == "queue full"
        assert response.headers["x-should-retry"] == "false"
        assert (len(engine.seen), len(other.seen)) == (1, 1)

    @pytest.mark.parametrize("status", [429, 503])
    async def test_what_a_refusal_says_of_retries_reaches_the_client(self, engine, client, status):
        advice = {"retry-after": "3", "retry-after-ms": "2900", "x-ratelimit-reset-tokens": "3s"}

        async def script(exchange):
            told = {"message": "full", "type": "rate_limit_error", "code": "busy"}
            await exchange.send({"error": told}, status=status, headers=[*advice.items(), ("x-odd", "1")])

        engine.script = script
        client.proxy.fleet.engines["b"].state = EngineState.DRAINING
        response = await client.post(CHAT, json=ASK)
        assert is_openai_error(response, status, "busy")
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert advice.items() <= dict(response.headers).items()
        assert not {"x-should-retry", "x-odd"} & set(response.headers)

    async def test_an_engine_that_says_when_to_come_back_is_not_overruled(self, engine, other, client):
        async def script(exchange):
            await exchange.send({"message": "full"}, status=429, headers=[("retry-after", "3")])

        engine.script = other.script = script
        response = await client.post(CHAT, json=ASK)
        assert (response.headers["retry-after"], "x-should-retry" in response.headers) == ("3", False)
        assert client.proxy.last.attempts == ["a", "b"]

    async def test_where_no_other_engine_was_asked_the_client_may_retry(self, engine, client):
        client.proxy.fleet.engines["b"].state = EngineState.DRAINING
        await engine.stop()
        response = await client.post(CHAT, json=ASK)
        assert is_openai_error(response, 502, "engine_failed")
        assert "x-should-retry" not in response.headers

    async def test_a_request_that_its_engine_blames_is_tried_on_no_other(self, engine, other, client):
        async def script(exchange):
            told = {"message": "the request failed", "type": "server_error", "code": "request_failed"}
            await exchange.send({"error": told}, status=500, headers=[("x-should-retry", "false")])

        engine.script = script
        response = await client.post(CHAT, json=ASK)
        assert is_openai_error(response, 500, "request_failed")
        assert response.json()["error"]["message"] == "the request failed"
        assert (response.headers["x-should-retry"], response.headers["x-kvpin-engine"]) == ("false", "a")
        assert (other.seen, client.proxy.last.attempts, client.proxy.last.status) == ([], ["a"], 500)
        assert client.proxy.fleet.engines["a"].state == "ready"

    async def test_a_request_that_broke_two_connections_is_tried_on_no_third(self, engine, other):
        async def script(exchange):
            exchange.die()

        async with FakeEngine("c") as third:
            engine.script = other.script = third.script = script
            async with proxy_over(engine, other, third) as proxy, client_of(proxy) as client:
                response = await client.post(CHAT, json=ASK)
                assert is_openai_error(response, 502, "engine_failed")
                assert response.headers["x-should-retry"] == "false"
                assert (len(third.seen), proxy.last.attempts) == (0, ["a", "b"])
                assert proxy.fleet.engines["c"].state == "ready"

    async def test_a_request_that_reached_no_engine_goes_on_to_the_third(self, engine, other):
        await engine.stop()
        await other.stop()
        async with (
            FakeEngine("c") as third,
            proxy_over(engine, other, third) as proxy,
            client_of(proxy) as client,
        ):
            assert (await client.post(CHAT, json=ASK)).headers["x-kvpin-engine"] == "c"

    async def test_a_body_is_kept_until_no_engine_can_get_it_any_more(
        self, engine, other, client, monkeypatch
    ):
        bodies, kept = [], Ready.body_for

        def note(ready, engine):
            bodies.append(kept(ready, engine))
            return bodies[-1]

        async def script(exchange):
            await exchange.start()
            await exchange.chunk(event("1"))
            await exchange.left.wait()

        monkeypatch.setattr(Ready, "body_for", note)
        await engine.stop()
        other.script = script
        async with client.stream("POST", CHAT, json=STREAM) as response:
            async for _ in response.aiter_raw():
                break
            assert {len(body.raw) for body in bodies if hasattr(body, "raw")} == set()
            assert len(bodies) >= 1
        await client.proxy.settled()

    async def test_an_upload_cannot_be_repeated(self, engine, other, client):
        await engine.stop()
        kind = {"content-type": "multipart/form-data; boundary=b"}
        response = await client.post("/v1/audio/transcriptions", content=b"--b--", headers=kind)
        assert is_openai_error(response, 502, "engine_failed")
        assert not other.seen


class TestPassedOn:
    """Routes that not all kinds of engines have: a client must not notice which engine was asked first."""

    FORM: ClassVar = {"content-type": "multipart/form-data; boundary=b"}

    @pytest.fixture
    async def client(self, engine, other):
        async with proxy_over(engine, other) as proxy, client_of(proxy) as client:
            client.proxy = proxy
            yield client
            await proxy.settled()

    @staticmethod
    def lacks(status):
        async def script(exchange):
            await exchange.send({"detail": "Not Found"}, status=status)

        return script

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
        async def script(exchange):
            await exchange.send({"text": "heard"})

        engine.script, other.script = self.lacks(404), script
        answers = [
            await client.post("/v1/audio/transcriptions", content=b"--b--", headers=self.FORM)
            for _ in range(3)
        ]
        assert [response.status_code for response in answers] == [404, 200, 200]

    async def test_if_no_engine_has_it_the_client_is_told_which_route(self, engine, other, client):
        engine.script = other.script = self.lacks(404)
        response = await client.post("/v1/embeddings", json={"model": "m", "input": "x"})
        assert is_openai_error(response, 404)
        assert response.json()["error"]["message"] == (
            "Not Found: no engine that was asked has the route /v1/embeddings"
        )

    async def test_a_405_names_the_methods_as_the_engine_does(self, engine, other, client):
        async def script(exchange):
            await exchange.send({"detail": "Method Not Allowed"}, 405, (("allow", "POST"),))

        engine.script = other.script = script
        for path in ("/v1/chat/completions", "/v1/files"):
            response = await client.put(path, json={"model": "m"})
            assert (response.status_code, response.headers["allow"]) == (405, "POST")

    async def test_it_is_asked_again_when_it_comes_back(self, client):
        fleet = client.proxy.fleet
        engine = fleet.engines["a"]
        engine.lacks.add("/v1/rerank")
        fleet.join(engine, engine.info)
        assert not engine.lacks

    @pytest.mark.parametrize(
        ("method", "path"), [("GET", "/v1/files/f-1/content"), ("DELETE", "/v1/files/f-1")]
    )
    async def test_a_file_is_found_on_the_engine_that_has_it(self, engine, other, client, method, path):
        async def script(exchange):
            await exchange.send(b"\x00\x01", headers=[("content-type", "application/octet-stream")])

        engine.script, other.script = self.lacks(404), script
        for _ in range(3):
            response = await client.request(method, path)
            assert (response.status_code, response.content) == (200, b"\x00\x01")
        assert client.proxy.fleet.engines["a"].state == "ready"

    async def test_more_engines_are_asked_than_are_tried_again(self, engine, other):
        engine.script = other.script = self.lacks(404)
        async with proxy_over(engine, other, rules=Rules(retries=0)) as proxy, client_of(proxy) as client:
            assert is_openai_error(await client.get("/v1/files/f-1"), 404)
        assert len(engine.seen) == len(other.seen) == 1


class TestWaiting:
    """No engine takes requests, and one may soon."""

    @pytest.fixture
    async def proxy(self, engine):
        async with proxy_over(engine, wait_s=5) as proxy:
            yield proxy
            await proxy.settled()

    async def test_a_request_waits_for_an_engine_to_become_ready(self, proxy, client):
        engine = proxy.fleet.engines["a"]
        proxy.fleet.leave(engine)
        engine.state = EngineState.DOWN
        asked = [asyncio.create_task(client.post(CHAT, json=ASK)) for _ in range(2)]
        await asyncio.sleep(0.05)
        proxy.fleet.join(engine, INFO)
        engine.state = EngineState.READY
        responses = await asyncio.wait_for(asyncio.gather(*asked), 2)
        assert [response.status_code for response in responses] == [200, 200]

    async def test_nor_for_an_engine_that_drains(self, proxy, client):
        proxy.fleet.engines["a"].state = EngineState.DRAINING
        response = await asyncio.wait_for(client.post(CHAT, json=ASK), 2)
        assert is_openai_error(response, 503, "no_engine")
        assert "try again shortly" in response.text, "it may leave, and another take its place"
        proxy.fleet.book.drain(order_name(proxy.fleet.engine("a").adapter.spec), drained=True, now=1.0)
        response = await asyncio.wait_for(client.post(CHAT, json=ASK), 2)
        assert is_openai_error(response, 503, "no_engine")
        assert "all engines that serve this model are drained" in response.text
        assert "try again" not in response.text

    async def test_a_suspect_engine_is_asked_where_it_is_the_only_one(self, proxy, client):
        proxy.fleet.engines["a"].state = EngineState.SUSPECT
        assert (await asyncio.wait_for(client.post(CHAT, json=ASK), 2)).status_code == 200


class TestRecords:
    @pytest.mark.parametrize(
        ("body", "status"), [({**ASK, "model": "none"}, 404), ({**ASK, "cache_salt": ""}, 400)]
    )
    async def test_a_clients_error_is_counted_by_its_status(self, proxy, client, body, status):
        assert (await client.post(CHAT, json=body)).status_code == status
        assert proxy.last.status == status
        metrics = proxy.metrics.render().decode()
        assert f'status="{status}"' in metrics
        assert 'status="failed"' not in metrics

    @pytest.mark.parametrize("streams", [False, True])
    async def test_the_parts_of_the_time_to_the_first_byte_add_up(self, engine, proxy, client, streams):
        timings = {"prompt_n": 9, "prompt_ms": 0.002, "predicted_ms": 0.001}

        async def script(exchange):
            said = {"message": {"content": "x"}, "delta": {"content": "x"}}
            chunk = {"choices": [said], "usage": {"completion_tokens": 1}, "timings": timings}
            if streams:
                await exchange.stream(event(chunk), DONE)
            else:
                await exchange.send(chunk)

        engine.script = script
        assert (await client.post(CHAT, json={**ASK, "stream": streams})).status_code == 200
        record, parts = proxy.last, proxy.last.first_byte_parts
        assert record.came < record.arrived < record.prepared < record.placed
        assert sum(parts.values()) == pytest.approx(record.placed + record.first_byte_s - record.came)
        assert parts["prefill"] == pytest.approx(2e-6)
        assert ("decode" in parts) is not streams
        assert {"read", "tokenise", "place", "engine"} <= parts.keys()

    async def test_tenants_that_use_one_request_id_have_a_record_each(self, engine):
        keys = [ApiKey.of(name, name) for name in ("red", "blue")]
        async with proxy_over(engine, tenants=Tenants(keys)) as proxy, client_of(proxy) as client:
            for name in ("red", "blue"):
                headers = {"authorization": f"Bearer {name}", "x-request-id": "same"}
                response = await client.post(CHAT, json=ASK, headers=headers)
                assert response.headers["x-request-id"] == "same"
            red, blue = proxy.requests
            assert (red.tenant, blue.tenant, red.client_request_id, blue.client_request_id) == (
                "red",
                "blue",
                "same",
                "same",
            )
            assert red.request_id != blue.request_id
            assert (proxy.requests.get("same", "red"), proxy.requests.get("same", "blue")) == (red, blue)


class TestReuse:
    """Prompts are ready token ids, so that no tokenizer is needed."""

    @pytest.fixture
    async def proxy(self, engine, other):
        async with proxy_over(engine, other, reuse=True) as proxy:
            for fake in (engine, other):
                fake.script = self.report(0)
            yield proxy
            await proxy.settled()

    @staticmethod
    def report(cached):
        async def script(exchange):
            usage = {"prompt_tokens_details": {"cached_tokens": cached}}
            await exchange.send({"choices": [{"text": "x"}], "usage": usage})

        return script

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

    async def test_a_burst_of_one_new_prompt_spreads_over_idle_engines(
        self, engine, other, proxy, client, monkeypatch
    ):
        # All are placed in one moment: on a busy machine, later ones would rather wait for the first.
        now = time.monotonic()
        monkeypatch.setattr("proxy.fleet.pool.monotonic", lambda: now)
        gate = asyncio.Event()

        async def script(exchange):
            await gate.wait()
            await exchange.send({"choices": [{"text": "x"}]})

        engine.script = other.script = script
        asks = [asyncio.create_task(self.ask(client, 0, 4000)) for _ in range(4)]
        while len(engine.seen) + len(other.seen) < 4:  # noqa: ASYNC110 - either engine
            await asyncio.sleep(0.005)
        gate.set()
        assert {name for name, _ in await asyncio.gather(*asks)} == {"a", "b"}

    async def test_a_session_breaks_ties_even_of_prompts_nobody_knows(self, proxy, client):
        homes = []
        for session in ("s", "t", "t", "s", None):
            headers = {"x-session-id": session} if session else {}
            response = await client.post("/v1/embeddings", json={"input": "x"}, headers=headers)
            homes.append(response.headers["x-kvpin-engine"])
            await proxy.settled()
        assert homes == ["a", "b", "b", "a", "b"]
        assert [record.session and record.session.name for record in proxy.requests] == [*"stts", None]

    @pytest.mark.parametrize("field", ["session_id", "prompt_cache_key", "user", "cache_control"])
    @pytest.mark.parametrize("headers", [{}, {"session-id": "s"}], ids=["no header", "a header"])
    async def test_a_field_that_says_nothing_readable_is_for_the_engine_to_judge(
        self, engine, proxy, client, field, headers
    ):
        body = b'{"model": "m", "prompt": [1, 2, 3], "%b": 1e999}' % field.encode()
        response = await client.post("/v1/completions", content=body, headers=headers)
        assert response.status_code == 200
        assert engine.seen[0].body == body
        assert proxy.last.session == (Session(None, "s") if headers else None)
        assert proxy.last.prompt_cache_key is None

    async def test_reports_are_held_against_firm_predictions_only(self, engine, proxy, client):
        other_engine = proxy.fleet.engines["b"]
        other_engine.state = EngineState.DOWN
        await self.ask(client, 0)
        audit = proxy.fleet.engines["a"].audit
        assert (audit.view().checked, audit.view().exact) == (1, 1)
        engine.script = self.report(16)
        await self.ask(client, 0)
        assert (audit.view().checked, audit.view().predicted_tokens, audit.view().reported_tokens) == (
            2,
            32,
            16,
        )
        gate = asyncio.Event()

        async def script(exchange):
            await gate.wait()
            await self.report(0)(exchange)

        engine.script = script
        asks = [asyncio.create_task(self.ask(client, 5000)) for _ in range(2)]
        await engine.request(3)
        gate.set()
        await asyncio.gather(*asks)
        assert audit.view().checked == 3, "the second of them was a guess about the first"

    async def test_what_requests_ahead_may_evict_is_not_checked(self, engine, proxy, client):
        proxy.fleet.engines["b"].state = EngineState.DOWN
        audit, pool = proxy.fleet.engines["a"].audit, proxy.fleet.pools["m"]
        await self.ask(client, 0)
        pool.placer.books["a"].gpu_blocks = 10
        gate = asyncio.Event()

        async def script(exchange):
            await gate.wait()
            await self.report(0)(exchange)

        engine.script = script
        asks = [asyncio.create_task(self.ask(client, start, n)) for start, n in ((5000, 400), (0, 40))]
        await engine.request(2)
        gate.set()
        assert [predicted for _, predicted in await asyncio.gather(*asks)] == [0, 32]
        await proxy.settled()
        assert (audit.view().checked, audit.view().unchecked) == (2, {Unchecked.MAY_BE_EVICTED: 1})

    async def test_every_request_is_counted_by_why_its_prediction_was_not_checked(
        self, engine, proxy, client
    ):
        proxy.fleet.engines["b"].state = EngineState.DOWN
        mine = proxy.fleet.engines["a"]
        await self.ask(client, 0)

        async def nothing(exchange):
            await exchange.send({"choices": [{"text": "x"}]})

        async def wrong(exchange):
            await exchange.send({"error": {"message": "no"}}, status=400)

        gate = asyncio.Event()

        async def held(exchange):
            await gate.wait()
            await self.report(8)(exchange)

        engine.script = nothing
        await self.ask(client, 0)
        await client.get("/v1/files/f-1")
        engine.script = self.report(100)
        await client.post("/v1/completions", json={"prompt": "a text, and no tokenizer"})
        engine.script = wrong
        await client.post("/v1/completions", json={"model": "m", "prompt": [1, 2, 3]})
        engine.script = held
        asks = [asyncio.create_task(self.ask(client, 5000)) for _ in range(2)]
        while mine.ledger.in_flight < 2:  # noqa: ASYNC110 - the second one waits for the first
            await asyncio.sleep(0.005)
        gate.set()
        await asyncio.gather(*asks)
        gate.clear()
        left = asyncio.create_task(self.ask(client, 9000))
        await engine.request(7)
        left.cancel()
        await proxy.settled()
        audit = mine.audit.view()
        assert audit.unchecked == {
            Unchecked.NOT_REPORTED: 1,
            Unchecked.NO_PROMPT: 1,
            Unchecked.PROMPT_UNKNOWN: 1,
            Unchecked.FAILED: 1,
            Unchecked.NOT_FIRM: 1,
            Unchecked.ENDED_EARLY: 1,
        }
        assert (mine.served, mine.failed, audit.checked, audit.cached_tokens) == (7, 1, 2, 116)

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

    async def test_what_is_learned_stays_within_the_engines_capacity(self, proxy, client):
        proxy.fleet.engines["b"].state = EngineState.DOWN
        for start in range(0, 100_000, 10_000):
            await self.ask(client, start, 160)
        await proxy.settled()
        assert len(proxy.fleet.pools["m"].index) == 64

    async def test_one_request_id_twice_is_two_requests(self, engine, proxy, client):
        gate = asyncio.Event()

        async def script(exchange):
            await gate.wait()
            await exchange.send({"choices": [{"text": "x"}]})

        engine.script = script
        proxy.fleet.engines["b"].state = EngineState.DOWN
        headers = {"x-request-id": "same"}
        asks = [asyncio.create_task(client.post(CHAT, json=ASK, headers=headers)) for _ in range(2)]
        await engine.request(1)
        assert proxy.fleet.engines["a"].ledger.in_flight == 2
        gate.set()
        await asyncio.gather(*asks)

    async def test_a_prompt_beyond_the_context_is_refused_here(self, engine, proxy, client):
        give_prompts(proxy.fleet.pools["m"], prompts_of(replace(INFO, max_model_len=30)))
        response = await client.post("/v1/completions", json={"model": "m", "prompt": list(range(40))})
        assert is_openai_error(response, 400, "context_length_exceeded", "prompt")
        assert not engine.seen
        assert "context" in proxy.last.error

    async def test_a_prompt_beyond_the_context_is_refused_with_the_fields_of_the_engine(self, proxy, client):
        def too_long(tokens, limit):
            return {"type": "too_big", "had": tokens, "most": limit}

        give_prompts(proxy.fleet.pools["m"], prompts_of(replace(INFO, max_model_len=30, too_long=too_long)))
        response = await client.post("/v1/completions", json={"model": "m", "prompt": list(range(40))})
        assert response.json()["error"] == {
            "message": "this model's context is 30 tokens; the prompt has 40",
            "type": "too_big",
            "param": "prompt",
            "code": "context_length_exceeded",
            "had": 40,
            "most": 30,
        }


class TestAdapters:
    """LoRA adapters, named as models. Engine `b` alone serves one."""

    @pytest.fixture
    async def proxy(self, engine, other):
        adapters = frozenset({"ada"})
        async with proxy_over(
            engine, HoldingAdapter(other, info=replace(INFO, loras=adapters)), reuse=True
        ) as proxy:
            for fake in (engine, other):
                fake.script = TestReuse.report(0)
            yield proxy
            await proxy.settled()

    async def test_its_requests_go_where_it_is_served_under_its_name(self, engine, other, proxy, client):
        for path, body in (
            (CHAT, {**ASK, "model": "ada"}),
            ("/v1/embeddings", {"model": "ada", "input": "x"}),
        ):
            response = await client.post(path, json=body)
            assert (response.status_code, response.headers["x-kvpin-engine"]) == (200, "b")
            assert other.seen[-1].json == body

    async def test_records_and_metrics_name_it(self, proxy, client):
        await TestReuse.ask(client, 0, model="ada", prompt_cache_key="k")
        assert (proxy.last.model, proxy.last.prompt.lora) == ("ada", "ada")
        assert proxy.requests.last_prompt("k", None) == ("ada", proxy.last.prompt)
        assert (
            'kvpin_requests_total{engine="b",model="ada",status="200"} 1.0' in proxy.metrics.render().decode()
        )

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
    def built(self, proxy):
        async def built():
            return await proxy.fleet.pools["m"].prompts.build(
                CHAT, JsonBody(json.dumps(LONG).encode()), salt=None
            )

        return built

    async def test_the_same_are_counted(self, a, proxy, client, built):
        ids = (await built()).token_ids
        a.make = lambda body: Hold(body, answer=Reader(tokens=ids))
        await client.post(CHAT, json=LONG)
        assert (proxy.last.tokens_agree, proxy.fleet.pools["m"].prompts.agreed) == (True, 1)
        await proxy.settled()
        assert len(proxy.fleet.pools["m"].index) > 0

    async def test_others_are_told_once_and_neither_learned_nor_held_against_the_view(
        self, a, proxy, client, built
    ):
        prompt = await built()
        ids = array("i", [*prompt.token_ids[:2], 7, *prompt.token_ids[3:]])
        a.make = lambda body: Hold(body, answer=Reader(tokens=ids))
        with structlog.testing.capture_logs() as logs:
            for _ in range(2):
                assert (await client.post(CHAT, json=LONG)).status_code == 200
        (log,) = [log for log in logs if "tokens" in log["event"]]
        assert (log["engine"], log["difference"]) == ("a", f"token 2 is {prompt.token_ids[2]} here, 7 there")
        assert proxy.last.tokens_agree is False
        await proxy.settled()
        pool = proxy.fleet.pools["m"]
        assert (len(pool.index), pool.prompts.differed, pool.prompts.exactness.ok) == (0, 2, False)
        assert proxy.fleet.engines["a"].audit.view().checked == 0
        name = 'kvpin_tokenisation_checks_total{engine="a",model="m",result="different"} 2.0'
        assert name in proxy.metrics.render().decode()

    async def test_an_engine_whose_answers_do_not_tell_is_asked_about_the_first_of_each_form(
        self, a, proxy, client, built
    ):
        ids, asked = (await built()).token_ids, []

        async def tokenize(path, body):
            asked.append((path, body.get("messages")))
            return ids[1:] if len(asked) == 1 else ids

        a.tokenize = tokenize
        for _ in range(18):
            await client.post(CHAT, json=LONG)
        assert asked == [(CHAT, LONG["messages"])] * 16
        prompts = proxy.fleet.pools["m"].prompts
        assert (prompts.agreed, prompts.differed, proxy.last.tokens_agree) == (15, 1, None)

    async def test_where_none_are_told_nothing_is_known(self, a, proxy, client):
        a.make = lambda body: Hold(body, answer=Reader())
        await client.post(CHAT, json=LONG)
        assert proxy.last.tokens_agree is None


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
    async def test_a_uuid_that_comes_with_other_content_is_refused(self, engine, reuse):
        async with proxy_over(engine, reuse=reuse) as proxy, client_of(proxy) as client:
            body = json.dumps(self.chat({**self.CAT, "uuid": "u"}))
            assert (await client.post(CHAT, content=body)).status_code == 200
            assert engine.seen[0].body == body.encode()
            refused = await client.post(CHAT, json=self.chat({**self.DOG, "uuid": "u"}))
            assert is_openai_error(refused, 400, code="invalid_value", param="messages[1].content[0].uuid")
            assert len(engine.seen) == 1
            assert "uuid" in proxy.last.error
            await proxy.settled()

    async def test_tenants_uuids_are_their_own(self, engine):
        keys = [ApiKey.of(name, name) for name in ("red", "blue")]
        async with proxy_over(engine, tenants=Tenants(keys)) as proxy, client_of(proxy) as client:
            for name, part in (("red", self.CAT), ("blue", self.DOG), ("red", {"image_url": None})):
                sent = self.chat({**part, "uuid": "u"})
                headers = {"authorization": f"Bearer {name}"}
                assert (await client.post(CHAT, json=sent, headers=headers)).status_code == 200
            red, blue, again = (seen.json["messages"][1]["content"][0]["uuid"] for seen in engine.seen)
            assert red == again
            assert len({red, blue, "u"}) == 3

    @pytest.mark.parametrize("reuse", [False, True])
    async def test_whose_salts_an_engine_may_hold_kv_under(self, engine, reuse):
        """Prompts that nobody here can tokenise leave KV all the same: a tenant's flush must reach it."""
        tenants = Tenants([ApiKey.of(name, name) for name in ("red", "blue")])
        async with proxy_over(engine, tenants=tenants, reuse=reuse) as proxy, client_of(proxy) as client:
            headers = {"authorization": "Bearer red"}
            for fields in ({}, {"cache_salt": "x"}):
                assert (await client.post(CHAT, json={**ASK, **fields}, headers=headers)).status_code == 200
            salts = proxy.fleet.engines["a"].salts
            assert salts.of("red") == {tenants.salt("red", None), tenants.salt("red", "x")}
            assert salts.of("blue") == frozenset()

    @pytest.mark.parametrize("path", [f"{CHAT}/", "/v1//chat/completions"])
    async def test_a_prompt_is_one_however_its_route_is_written(self, engine, path):
        """Else it would have no salt, and an engine that serves the path would share its KV."""
        async with proxy_over(engine) as proxy, client_of(proxy) as client:
            await client.post(path, json=ASK)
            assert (proxy.last.route, proxy.last.runs_prompt) == (CHAT, True)

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
    async def proxy(self, a, b):
        async with proxy_over(a, b, reuse=True) as proxy:
            yield proxy
            await proxy.settled()

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

    async def test_its_note_stands_in_header_and_record(self, a, proxy, client):
        a.make = lambda body: Hold(body, note="it ran alone")
        response = await client.post(self.PROMPT, json=self.BODY)
        assert (response.headers["x-kvpin-note"], proxy.last.note) == ("it ran alone", "it ran alone")

    async def test_it_ends_with_an_error_of_the_clients_making(self, a, engine, b, client):
        async def script(exchange):
            await exchange.send({"error": {"message": "no"}}, status=400)

        engine.script = script
        assert (await client.post(self.PROMPT, json=self.BODY)).status_code == 400
        assert (a.ended, b.asked) == ([None], [])

    async def test_it_ends_before_another_engine_is_tried(self, a, engine, b, other, client):
        async def script(exchange):
            assert a.ended == [EngineUnreachable]
            await exchange.send({"choices": [{"text": "x"}]})

        await engine.stop()
        other.script = script
        b.make = lambda body: Hold(body, cached_tokens=16)
        response = await client.post(self.PROMPT, json=self.BODY)
        assert (response.headers["x-kvpin-engine"], response.headers["x-kvpin-predicted-tokens"]) == (
            "b",
            "16",
        )
        assert (a.ended, b.ended) == ([EngineUnreachable], [None])

    async def test_a_note_of_an_engine_that_failed_is_not_told(self, a, engine, proxy, client):
        a.make = lambda body: Hold(body, note="alone")
        await engine.stop()
        response = await client.post(self.PROMPT, json=self.BODY)
        assert ("x-kvpin-note" in response.headers, proxy.last.note) == (False, "")

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
        async def script(exchange):
            if stream:
                await exchange.start()
                await exchange.chunk(b"data: 1\n\n")
            await exchange.left.wait()

        engine.script = script
        reader, writer = await connect_to(proxy)
        writer.write(post(self.PROMPT, json.dumps({**self.BODY, "stream": stream}).encode()))
        if stream:
            await reader.readuntil(b"data: 1")
        else:
            await engine.request()
        assert a.ended == []
        writer.close()
        await asyncio.wait_for(a.one_ended.wait(), 5)
        assert a.ended == [asyncio.CancelledError]

    async def test_an_engine_that_is_lost_while_it_is_awaited_is_replaced(self, a, b, proxy, client):
        waiting = asyncio.Event()

        @asynccontextmanager
        async def hold(path, body, prompt):
            waiting.set()
            await asyncio.Event().wait()
            yield

        a.hold = hold
        asked = asyncio.create_task(client.post(self.PROMPT, json=self.BODY))
        await asyncio.wait_for(waiting.wait(), 5)
        proxy.fleet.engines["a"].abandon()
        assert (await asked).headers["x-kvpin-engine"] == "b"

    @pytest.mark.parametrize(("asked", "priority"), [({"prompt_cache_retention": "24h"}, 1), ({}, 0)])
    async def test_the_engine_is_told_how_long_to_keep_it(self, a, b, client, asked, priority):
        await client.post(self.PROMPT, json={**self.BODY, **asked})
        (_, prompt) = (a.asked + b.asked)[0]
        assert prompt.retention.priority == priority

    async def test_the_engine_is_told_whose_conversation_it_is(self, a, b, client):
        for asked in ({"prompt_cache_key": "mine"}, {"prompt_cache_key": "mine"}, {}):
            await client.post(self.PROMPT, json={**self.BODY, **asked})
        told = [prompt.session for _, prompt in a.asked + b.asked]
        assert sorted(told, key=str) == [*[Session(None, "mine").digest] * 2, None]

    @pytest.mark.parametrize(
        ("retains", "ttl", "told"), [(True, "30m", "1800"), (False, "30m", "0"), (True, None, None)]
    )
    async def test_the_client_is_told_whether_it_is_kept(self, a, b, client, retains, ttl, told):
        a.make = b.make = lambda body: Hold(body, retains=retains)
        answer = await client.post(self.PROMPT, json={**self.BODY, "prompt_cache_options": {"ttl": ttl}})
        assert answer.headers.get("x-kvpin-retention") == told

    async def test_a_time_that_is_none_is_refused(self, client):
        answer = await client.post(self.PROMPT, json={**self.BODY, "prompt_cache_retention": "99y"})
        assert is_openai_error(answer, 400, "invalid_value", "prompt_cache_retention")

    async def test_a_comparison_with_what_is_no_id_is_refused(self, proxy, client):
        options = {"comparison_response_id": 5}
        answer = await client.post(CHAT, json={**ASK, "prompt_cache_options": options})
        assert is_openai_error(answer, 400, "invalid_value", "prompt_cache_options.comparison_response_id")
        assert proxy.requests.get(answer.headers["x-request-id"]).status == 400

    async def test_a_forecast_decides_where_it_goes(self, a, b, proxy, client):
        a.foreseen = Forecast(cached_tokens=39, wait_s=3.0)
        b.foreseen = Forecast(cached_tokens=5, firm=False, prefill_s=1.0)
        response = await client.post(self.PROMPT, json=self.BODY)
        assert (response.headers["x-kvpin-engine"], response.headers["x-kvpin-predicted-tokens"]) == (
            "b",
            "5",
        )
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
        keys = [ApiKey.of(name, name) for name in ("red", "blue")]
        async with proxy_over(engine, tenants=Tenants(keys)) as proxy, client_of(proxy) as client:
            client.proxy = proxy
            yield client

    async def ask(self, client, tenant="red", **options):
        body = {"model": "m", "input": "x"} | ({"prompt_cache_options": options} if options else {})
        headers = {"authorization": f"Bearer {tenant}"}
        return (await client.post("/v1/responses", json=body, headers=headers)).json()

    async def test_a_chat_is_found_by_its_id(self, client):
        async def chat(compared=None, **fields):
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields
            headers = {"authorization": "Bearer red"}
            if compared is not None:
                headers["x-kvpin-compare-with"] = compared
            answer = (await client.post("/v1/chat/completions", json=body, headers=headers)).json()
            return answer, client.proxy.last.answer_id

        assert await chat() == ({**self.SAID, "id": "resp_1"}, "resp_1")
        answer, _ = await chat(prompt_cache_options={"comparison_response_id": "resp_1"})
        assert answer["prompt_cache_diagnostics"]["kvpin"]["reason"] == "not_followed"
        answer, _ = await chat(compared="resp_1")
        assert answer["prompt_cache_diagnostics"]["kvpin"]["reason"] == "not_followed"
        answer, _ = await chat(compared="resp_9")
        assert answer["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}

    @pytest.mark.parametrize("fields", [{"metadata": {"a": "b"}}, {"prompt_cache_key": "k"}])
    async def test_a_chat_that_names_the_cache_is_told_what_it_got(self, engine, client, fields):
        async def script(exchange):
            await exchange.send({**self.SAID, "usage": {"prompt_tokens": 50}})

        engine.script = script
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields
        headers = {"authorization": "Bearer red"}
        usage = (await client.post("/v1/chat/completions", json=body, headers=headers)).json()["usage"]
        assert ("prompt_tokens_details" in usage) is ("prompt_cache_key" in fields)

    @pytest.mark.parametrize("tenant", ["red", "blue"])
    async def test_an_answer_of_nobody_or_of_another_tenant_is_not_found(self, client, tenant):
        await self.ask(client)
        named = "resp_9" if tenant == "red" else "resp_1"
        found = await self.ask(client, tenant, comparison_response_id=named)
        assert found["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}

    async def test_the_body_is_kept_for_comparison_and_the_record_says_whose_it_is(self, client):
        await self.ask(client)
        record = client.proxy.last
        assert client.proxy.requests.sources.fields(record.request_id, "red") == {"input": "x"}
        assert client.proxy.requests.sources.fields(record.request_id, "blue") is None
