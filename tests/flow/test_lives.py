"""What four trials broke between good modules, over real sockets. Each failed before a request's life had
one owner (`proxy/core/life.py`). The names begin with the number in the trials' list."""

import asyncio
import gzip
import json
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import httpx
import pytest

from engine_adapter import EngineDied, Hold
from engine_adapter.types import MESSAGES_ROUTES, RESPONSES_ROUTES
from proxy.api import openai
from proxy.core.life import Cause, Rules
from proxy.core.quotas import TenantLimits
from proxy.request.tenants import ApiKey, Tenants
from proxy.steps import request
from tests.fakes import (
    ANSWER,
    ASK,
    CHAT,
    DONE,
    INFO,
    STREAM,
    FakeAdapter,
    FakeEngine,
    asked,
    client_of,
    event,
    is_openai_error,
    proxy_over,
)
from tests.kv_world import until
from tests.scripts import dies, hangs, streams

SILENT = Rules(first_byte_s=5, idle_s=1)


def chunk(text, finish=None):
    delta = {"content": text} if text else {}
    return event({"id": "1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def words(text):
    return [chunk(word + " ") for word in text.split()]


def whole(text):
    return [*words(text), chunk("", "stop"), DONE]


async def stream(client, path, body):
    """The bytes of a stream, and whether it ended cleanly."""
    got = b""
    try:
        async with client.stream("POST", path, json=body) as answer:
            async for part in answer.aiter_raw():
                got += part
    except httpx.RemoteProtocolError:
        return got, False
    return got, True


def text_of(raw):
    events = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]
    chats = [each["choices"][0]["delta"].get("content") for each in events if each.get("choices")]
    deltas = [each.get("delta") for each in events]
    messages = [each.get("text") for each in deltas if isinstance(each, dict)]
    responses = [each for each in deltas if isinstance(each, str)]
    return "".join(text for text in (*chats, *messages, *responses) if text)


ASKS = {
    CHAT: {**STREAM, "temperature": 0},
    "/v1/messages": {
        "model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], "stream": True,
        "temperature": 0,
    },
    "/v1/responses": {"model": "m", "input": "Hi", "stream": True, "temperature": 0},
}  # fmt: skip
FRANCE = "The capital of France is Paris."


class TestB1AMigratedStreamThatOneEngineWouldAnswerOtherwise:
    @pytest.fixture
    async def served(self, engines):
        info = replace(INFO, served_as_chats=MESSAGES_ROUTES | RESPONSES_ROUTES)
        adapters = [FakeAdapter(each.id, each.url, info) for each in engines]
        async with proxy_over(*adapters) as proxy, client_of(proxy) as client:
            yield proxy, client
            await proxy.settled()
            assert proxy.flow.attempts.room.used == 0

    @pytest.mark.parametrize("path", ASKS)
    async def test_the_third_engine_gives_the_rest(self, engines, served, path):
        proxy, client = served
        a, b, c = engines
        a.script = dies(*words("The capital of France"))
        b.script = streams(*whole("The capital city of all France is Paris"))
        c.script = streams(*whole(FRANCE))
        got, is_clean = await stream(client, path, ASKS[path])
        assert (text_of(got), is_clean) == (f"{FRANCE} ", True)
        record = proxy.last
        assert (record.attempts, record.cause, record.error) == (["a", "b", "c"], Cause.ANSWERED, None)
        assert record.died == ["a"]
        assert proxy.fleet.engines["b"].state == "ready"  # another answer is no failure of its engine

    @pytest.mark.parametrize("path", ASKS)
    async def test_nothing_follows_an_error_that_ended_the_stream(self, engines, served, path):
        proxy, client = served
        a, b, c = engines
        a.script = dies(*words("The capital"))
        b.script = streams(*words(FRANCE), event({"error": {"message": "broke", "code": 500}}), DONE)
        c.script = streams(*whole(FRANCE))
        got, is_clean = await stream(client, path, ASKS[path])
        assert (text_of(got), is_clean, b"broke" in got) == (f"{FRANCE} ", True, True)
        assert (await client.get("/v1/models")).status_code == 200  # on the same connection
        assert (proxy.last.attempts, proxy.last.cause, c.seen) == (["a", "b"], Cause.ENGINE_REFUSED, [])

    @pytest.mark.parametrize("path", ASKS)
    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("ab ab ab ab", "ab ab !"),  # stops early on repeating text
            ("ab ab ab", "ab ab ab"),  # stops where the client's text ends: that is all of it
            ("the quick brown fox jumps", "the quick brown cat jumps over"),
            ("the quick brown fox jumps", "the"),
        ],
    )
    async def test_b10_repeats_early_ends_and_other_endings(self, engines, served, path, first, second):
        _, client = served
        a, b, c = engines
        rest = f"{first} over the dog!"
        a.script, b.script, c.script = dies(*words(first)), streams(*whole(second)), streams(*whole(rest))
        got, is_clean = await stream(client, path, ASKS[path])
        expected = f"{second} " if second == first else f"{rest} "
        assert (text_of(got), is_clean) == (expected, True)

    @pytest.mark.parametrize("path", ASKS)
    async def test_b10_where_all_differ_the_client_is_told(self, engines, served, path):
        proxy, client = served
        a, b, c = engines
        a.script = dies(*words("The quick brown fox jumps over"))
        b.script = streams(*whole("A completely other answer."))
        c.script = streams(*whole("The quick brown fox sleeps."))
        got, is_clean = await stream(client, path, ASKS[path])
        assert (text_of(got), is_clean) == ("The quick brown fox jumps over ", False)
        assert b"gave another one" in got
        assert b"[DONE]" not in got
        assert b'"request_id":null' not in got
        assert proxy.last.cause is Cause.DIVERGED

    async def test_b10_one_that_stalls_is_followed_by_one_that_does_not(self):
        dead, stalled = dies(*words("The capital")), hangs(*words("The capital of"))
        async with asked(dead, stalled, streams(*whole(FRANCE)), rules=SILENT) as (proxy, client, *_):
            got, is_clean = await stream(client, CHAT, ASKS[CHAT])
            assert (text_of(got), is_clean) == (f"{FRANCE} ", True)
            assert proxy.last.attempts == ["a", "b", "c"]


class TestB5AnAttemptOwnsItsDeadlines:
    @pytest.mark.parametrize("gone", ["removed", "replaced"])
    async def test_a_stream_of_a_removed_or_replaced_engine_still_ends(self, gone):
        async with asked(hangs(*words("The capital")), rules=SILENT) as (proxy, client, a):
            answer = asyncio.create_task(stream(client, CHAT, STREAM))
            await a.request()
            proxy.fleet.remove(proxy.fleet.engine("a"))
            if gone == "replaced":
                proxy.add(a)
            got, is_clean = await asyncio.wait_for(answer, 5)
            assert (text_of(got), is_clean) == ("The capital ", False)
            assert b"nothing of the answer came for 1 s" in got


class TestB6KvpinsOwnLimitsBlameNoEngine:
    @pytest.mark.parametrize(
        ("rules", "cause"),
        [
            (Rules(total_s=0.1), Cause.OUR_LIMIT),
            (Rules(idle_s=0.1), Cause.ENGINE_SILENT),
        ],
    )
    async def test_a_limit_that_ends_streams_opens_no_breaker(self, rules, cause):
        async with asked(hangs(*words("The capital")), rules=rules) as (proxy, client, _):
            for _ in range(6):
                await stream(client, CHAT, STREAM)
                assert proxy.last.cause is cause
            engine = proxy.fleet.engines["a"]
            assert (engine.state, engine.breaker) == ("ready", None)


class TestB12TheEndOfAnAnswerIsNoText:
    @pytest.mark.parametrize("text", ["[DONE]", "data: [DONE]", '"finish_reason": "stop"'])
    async def test_text_like_an_end_that_just_stops_is_not_whole(self, text):
        said = chunk(f"The mark\n\n{text}\n\n")
        second = streams(said, chunk("ends it."), chunk("", "stop"), DONE)
        async with asked(streams(said), second) as (proxy, client, *_):
            got, is_clean = await stream(client, CHAT, ASKS[CHAT])
            assert (text_of(got), is_clean) == (f"The mark\n\n{text}\n\nends it.", True)
            assert proxy.last.attempts == ["a", "b"]

    @pytest.mark.parametrize("told", [0, 2, 6])  # bytes of the reason, and of what follows it
    async def test_an_end_that_breaks_off_is_none(self, told):
        said, last = chunk("It ends "), chunk("", "stop")
        first = streams(said, last[: last.rindex(b"stop") + told])
        async with asked(first, streams(said, last, DONE)) as (proxy, client, *_):
            got, is_clean = await stream(client, CHAT, ASKS[CHAT])
            assert (got.replace(b" ", b""), is_clean) == ((said + last + DONE).replace(b" ", b""), True)
            assert proxy.last.attempts == ["a", "b"]

    @pytest.mark.parametrize("temperature", [0, 1])  # without 0, no other engine could go on
    async def test_what_breaks_off_after_the_end_is_left_out(self, temperature):
        said = b"".join(whole("It ends"))[: -len(DONE)]
        first = streams(said + b'data: {"choices": [], "usage": {"prompt')
        async with asked(first, streams()) as (proxy, client, *_):
            got, is_clean = await stream(client, CHAT, {**ASKS[CHAT], "temperature": temperature})
            assert (got, is_clean, proxy.last.attempts) == (said, True, ["a"])

    @pytest.mark.parametrize("last", [b'data: {"choices": []}', b"data: [DONE]", b"data:[DONE]\n"])
    async def test_the_last_event_may_lack_its_blank_line(self, last):
        said = b"".join(whole("It ends"))[: -len(DONE)] + last
        async with asked(streams(said), streams()) as (proxy, client, *_):
            assert await stream(client, CHAT, ASKS[CHAT]) == (said, True)
            assert proxy.last.attempts == ["a"]


class TestWhatATrialFound:
    async def test_parts_share_the_time_limit_of_the_whole(self):
        async def slow(exchange):
            await asyncio.sleep(0.4)
            await exchange.send(ANSWER)

        tenants = Tenants([ApiKey.of("k", "t")], {"t": TenantLimits(concurrent_requests=1)})
        async with asked(
            slow, headers={"authorization": "Bearer k"}, reuse=True, tenants=tenants, rules=Rules(total_s=0.6)
        ) as (_proxy, client, *_):
            body = {"model": "m", "prompt": ["a", "b", "c", "d"]}
            response = await client.post("/v1/completions", json=body)
            assert is_openai_error(response, 504, "time_limit")
            assert "longer than 0.6 s" in response.json()["error"]["message"]

    async def test_an_error_of_the_clean_up_does_not_hide_that_the_client_left(self):
        class Raises(FakeAdapter):
            @asynccontextmanager
            async def hold(self, path, body, prompt):
                try:
                    yield Hold(body)
                except asyncio.CancelledError:
                    raise EngineDied("the clean-up failed") from None

        async def silent(_exchange):
            await asyncio.sleep(60)

        async with (
            FakeEngine("a", silent) as first,
            FakeEngine("b", silent) as second,
            proxy_over(reuse=True) as proxy,
        ):
            for engine in (first, second):
                proxy.add(Raises(engine.id, engine.url))
            async with client_of(proxy) as client:
                asking = asyncio.create_task(client.post(CHAT, json=ASK))
                await until(lambda: first.seen + second.seen)
                asking.cancel()
                with suppress(asyncio.CancelledError):
                    await asking
            await until(lambda: [*proxy.requests])
            assert len(first.seen + second.seen) == 1
            assert (proxy.last.cause, proxy.last.status) == (Cause.CLIENT_LEFT, 499)

    @pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
    async def test_a_length_of_the_engines_stream_is_not_the_clients(self, path):
        said = b"".join(whole(FRANCE))
        sizes = [("content-type", "text/event-stream"), ("content-length", str(len(said)))]
        async with asked(streams(said, headers=sizes)) as (proxy, client, *_):
            fields = {"messages": STREAM["messages"]} if path != "/v1/responses" else {"input": "hi"}
            body = {"model": "m", "max_tokens": 20, "stream": True, **fields}
            answer = await client.post(path, json=body)
            assert "content-length" not in answer.headers
            assert all(word in answer.text for word in ("The ", "France", "Paris."))
            assert proxy.last.cause is Cause.ANSWERED

    @pytest.mark.parametrize("content", [[{"type": "text", "text": "Hi"}], 7, {"a": 1}])
    async def test_a_stream_whose_text_is_no_text_is_passed_on(self, content):
        odd = event({"id": "1", "choices": [{"index": 0, "delta": {"content": content}}]})

        async with asked(streams(*[odd] * 300, DONE), streams(*[odd] * 300, DONE)) as (proxy, client, *_):
            answer = await client.post(CHAT, json=STREAM)
            assert answer.text.count('"index"') == 300
            assert proxy.last.cause is Cause.ANSWERED

    async def test_text_of_another_choice_is_not_taken_for_what_the_client_has(self):
        def of(index, text):
            return event({"id": "1", "choices": [{"index": index, "delta": {"content": text}}]})

        second = streams(of(1, "The capital"), of(0, "The"), of(0, " end"), DONE)
        async with asked(dies(of(0, "The")), second) as (_proxy, client, *_):
            raw, _ = await stream(client, CHAT, STREAM)
            assert text_of(raw) == "The"
            assert b'"error"' in raw

    @pytest.mark.parametrize("end", [b"", chunk("", "length")])
    async def test_a_stream_that_just_ends_is_not_whole_however_it_samples(self, end):
        async with asked(streams(*words("The capital"), end)) as (proxy, client, *_):
            raw, is_clean = await stream(client, CHAT, {**STREAM, "temperature": 1})
            assert text_of(raw) == "The capital "
            if end:  # some engines send no [DONE]
                assert (is_clean, proxy.last.cause) == (True, Cause.ANSWERED)
            else:
                assert (is_clean, proxy.last.cause) == (False, Cause.ENGINE_DIED)
                assert json.loads(raw.split(b"data: ")[-1])["error"]["code"] == "engine_failed"

    @pytest.mark.parametrize(
        "rest",
        [
            [event({"choices": [], "usage": {"x": "y" * 40_000}})],
            [event({"choices": [{"index": 1, "delta": {"content": "z" * 99}}]})] * 200,
            [b": bye\n\n"] * 3000,
        ],
        ids=["a long event", "another choice", "comments"],
    )
    @pytest.mark.parametrize("temperature", [0, 1])
    async def test_what_follows_the_end_may_be_long(self, rest, temperature):
        sent = [*words("The capital"), chunk("", "stop"), *rest]
        async with asked(streams(*sent)) as (proxy, client, _):
            raw, is_clean = await stream(client, CHAT, {**STREAM, "temperature": temperature})
            assert (raw, is_clean, proxy.last.cause) == (b"".join(sent), True, Cause.ANSWERED)

    @pytest.mark.parametrize(
        "end",
        [
            event({"error": {"code": 400, "message": "the context is full"}}),
            b'error: {"code":400,"message":"the context is full"}\n\n',
        ],
    )
    async def test_an_engine_that_ends_its_stream_by_an_error_has_not_died(self, end):
        """A llama-server sends no [DONE] after it."""
        sent = [*words("The capital"), end]
        async with asked(streams(*sent)) as (proxy, client, _):
            raw, is_clean = await stream(client, CHAT, STREAM)
            assert (raw, is_clean) == (b"".join(sent), True)
            assert proxy.fleet.engines["a"].state == "ready"
            assert (proxy.last.cause, proxy.last.error) == (Cause.ENGINE_REJECTED, "the context is full")

    async def test_text_that_looks_like_an_error_is_none(self):
        text = '\ndata: {"error":{"message":"x"}}\n\nerror: {}'
        async with asked(streams(chunk(text))) as (proxy, client, _):
            _, is_clean = await stream(client, CHAT, STREAM)
            assert (is_clean, proxy.last.cause) == (False, Cause.ENGINE_DIED)

    async def test_an_event_that_is_too_long_to_be_held_back_passes(self):
        """Such as a picture."""
        picture = event({"b64_json": "x" * (9 << 20)})
        sent = [picture[:5], *(picture[at : at + (1 << 20)] for at in range(5, len(picture), 1 << 20))]
        sent += [event({"type": "completed"}), b"data: no end"]
        async with asked(streams(*sent)) as (_proxy, client, _):
            body = {"model": "m", "prompt": "x", "stream": True}
            raw, is_clean = await stream(client, "/v1/images/generations", body)
            assert is_clean
            assert raw == b"".join(sent)

    async def test_half_an_event_is_not_sent_before_the_error(self):
        async with asked(dies(*words("The capital"), chunk("of")[:-9])) as (_proxy, client, *_):
            raw, _ = await stream(client, CHAT, {**STREAM, "temperature": 1})
            events = [json.loads(each[6:]) for each in raw.split(b"\n\n") if each]
            assert [*events[-1]] == ["error"]
            assert text_of(raw) == "The capital "

    @pytest.mark.parametrize("temperature", [0, 1])
    async def test_a_compressed_stream_is_passed_on_as_it_is(self, temperature):
        packed = gzip.compress(b"".join(whole(FRANCE)))
        kinds = [("content-type", "text/event-stream"), ("content-encoding", "gzip")]
        compressed = streams(packed, headers=kinds)
        async with asked(compressed, compressed) as (proxy, client, first, second):
            raw, is_clean = await stream(client, CHAT, {**STREAM, "temperature": temperature})
            assert (raw, is_clean, proxy.last.cause) == (packed, True, Cause.ANSWERED)
            assert len(first.seen + second.seen) == 1

    async def test_a_content_type_in_capitals_is_the_same(self):
        capitals = dies(*words("The capital"), headers=[("content-type", "Text/Event-Stream")])
        async with asked(capitals, streams(*whole(FRANCE))) as (proxy, client, *_):
            raw, is_clean = await stream(client, CHAT, ASKS[CHAT])
            assert (text_of(raw), is_clean, proxy.last.attempts) == (f"{FRANCE} ", True, ["a", "b"])

    async def test_the_time_limit_begins_with_the_head(self):
        async def slowly():
            yield b'{"model": "m", '
            await asyncio.sleep(1)
            yield b'"messages": [{"role": "user", "content": "Hi"}]}'

        async with asked(hangs(headers=None), rules=Rules(total_s=2)) as (proxy, client, engine):
            kind, begun = {"content-type": "application/json"}, time.monotonic()
            answer = await client.post(CHAT, content=slowly(), headers=kind)
            assert time.monotonic() - begun < 2.8
            assert is_openai_error(answer, 504, "time_limit")
            assert (proxy.last.cause, len(engine.seen)) == (Cause.OUR_LIMIT, 1)

    @pytest.mark.parametrize("n", [1, 2])
    async def test_what_hangs_before_or_after_a_life_has_an_end(self, monkeypatch, n):
        """A clean-up that nothing else ends, for a request and for the parts of one."""

        class Hangs(FakeAdapter):
            @asynccontextmanager
            async def hold(self, path, body, prompt):
                try:
                    yield Hold(body)
                finally:
                    await asyncio.sleep(60)

        monkeypatch.setattr(openai, "CLEAN_UP_S", 0.1)
        monkeypatch.setattr(request, "CLEAN_UP_S", 1)  # where both interrupt at once
        async with (
            FakeEngine("a", hangs()) as engine,
            proxy_over(rules=Rules(total_s=0.2), reuse=True) as proxy,
        ):
            proxy.add(Hangs(engine.id, engine.url))
            async with client_of(proxy) as client, asyncio.timeout(10):
                answer = await client.post(CHAT, json={**ASK, "n": n})
            assert is_openai_error(answer, 504, "time_limit")
            assert proxy.last.cause is Cause.OUR_LIMIT
            await proxy.settled()
