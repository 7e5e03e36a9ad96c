"""What four trials broke between good modules, over real sockets. Each failed before a request's life had
one owner (`proxy/core/life/`). The names begin with the number in the trials' list."""

import asyncio
import json
from dataclasses import replace

import httpx
import pytest

from engine_adapter.types import MESSAGES_ROUTES, RESPONSES_ROUTES
from proxy.core.life import Cause, Rules
from tests.fakes import CHAT, DONE, INFO, STREAM, FakeAdapter, FakeEngine, client_of, event, proxy_over

QUICK = Rules(first_byte_s=5, idle_s=0.2)


def chunk(text, finish=None):
    delta = {"content": text} if text else {}
    return event({"id": "1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def words(text):
    return [chunk(word + " ") for word in text.split()]


def whole(text):
    return [*words(text), chunk("", "stop"), DONE]


def dying(*chunks):
    async def script(exchange):
        await exchange.start()
        for part in chunks:
            await exchange.chunk(part)
        exchange.die()

    return script


def telling(*chunks):
    async def script(exchange):
        await exchange.stream(*chunks)

    return script


def stalling(*chunks):
    async def script(exchange):
        await exchange.start()
        for part in chunks:
            await exchange.chunk(part)
        await exchange.left.wait()

    return script


@pytest.fixture
async def engines():
    async with FakeEngine("a") as a, FakeEngine("b") as b, FakeEngine("c") as c:
        yield a, b, c


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
    """The text of a stream of any API."""
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
        async with proxy_over(*adapters, rules=QUICK) as proxy, client_of(proxy) as client:
            yield proxy, client
            await proxy.settled()
            assert proxy.flow.attempts.room.used == 0

    @pytest.mark.parametrize("path", ASKS)
    async def test_the_third_engine_gives_the_rest(self, engines, served, path):
        proxy, client = served
        a, b, c = engines
        a.script = dying(*words("The capital of France"))
        b.script = telling(*whole("The capital city of all France is Paris"))
        c.script = telling(*whole(FRANCE))
        got, is_clean = await stream(client, path, ASKS[path])
        assert (text_of(got), is_clean) == (f"{FRANCE} ", True)
        record = proxy.last
        assert (record.attempts, record.cause, record.error) == (["a", "b", "c"], Cause.ANSWERED, None)
        assert record.died == ["a"]
        assert proxy.fleet.engines["b"].state == "ready"  # another answer is no failure of its engine

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
        a.script, b.script, c.script = dying(*words(first)), telling(*whole(second)), telling(*whole(rest))
        got, is_clean = await stream(client, path, ASKS[path])
        expected = f"{second} " if second == first else f"{rest} "
        assert (text_of(got), is_clean) == (expected, True)

    @pytest.mark.parametrize("path", ASKS)
    async def test_b10_where_all_differ_the_client_is_told(self, engines, served, path):
        proxy, client = served
        a, b, c = engines
        a.script = dying(*words("The quick brown fox jumps over"))
        b.script = telling(*whole("A completely other answer."))
        c.script = telling(*whole("The quick brown fox sleeps."))
        got, is_clean = await stream(client, path, ASKS[path])
        assert (text_of(got), is_clean) == ("The quick brown fox jumps over ", False)
        assert b"gave another one" in got
        assert b"[DONE]" not in got
        assert b'"request_id":null' not in got
        assert proxy.last.cause is Cause.DIVERGED

    async def test_b10_one_that_stalls_is_followed_by_one_that_does_not(self, engines, served):
        proxy, client = served
        a, b, c = engines
        a.script = dying(*words("The capital"))
        b.script = stalling(*words("The capital of"))
        c.script = telling(*whole(FRANCE))
        got, is_clean = await stream(client, CHAT, ASKS[CHAT])
        assert (text_of(got), is_clean) == (f"{FRANCE} ", True)
        assert proxy.last.attempts == ["a", "b", "c"]

    async def test_the_second_engine_adds_something_before_it_is_silent(self, engines, served):
        _, client = served
        a, b, c = engines
        a.script = dying(*words("The capital"))
        b.script = stalling(*words("The capital of France"))
        c.script = telling(*whole(FRANCE))
        got, is_clean = await stream(client, CHAT, ASKS[CHAT])
        assert (text_of(got), is_clean) == (f"{FRANCE} ", True)


class TestB5AnAttemptOwnsItsDeadlines:
    @pytest.mark.parametrize("gone", ["removed", "replaced"])
    async def test_a_stream_of_a_removed_or_replaced_engine_still_ends(self, engines, gone):
        a, _, _ = engines
        a.script = stalling(*words("The capital"))
        async with proxy_over(a, rules=QUICK) as proxy, client_of(proxy) as client:
            answer = asyncio.create_task(stream(client, CHAT, STREAM))
            while not a.seen:  # noqa: ASYNC110 - the engine has no event for it
                await asyncio.sleep(0.01)
            proxy.fleet.remove(proxy.fleet.engine("a"))
            if gone == "replaced":
                proxy.add(a)
            got, is_clean = await asyncio.wait_for(answer, 5)
            assert (text_of(got), is_clean) == ("The capital ", False)
            assert b"nothing of the answer came for 0.2 s" in got


class TestB6KvpinsOwnLimitsBlameNoEngine:
    @pytest.mark.parametrize(
        ("rules", "cause"),
        [
            (Rules(total_s=0.1), Cause.OUR_LIMIT),
            (Rules(idle_s=0.1), Cause.ENGINE_SILENT),
        ],
    )
    async def test_a_limit_that_ends_streams_opens_no_breaker(self, engines, rules, cause):
        a, _, _ = engines
        a.script = stalling(*words("The capital"))
        async with proxy_over(a, rules=rules) as proxy, client_of(proxy) as client:
            for _ in range(6):
                await stream(client, CHAT, STREAM)
                assert proxy.last.cause is cause
            engine = proxy.fleet.engines["a"]
            assert (engine.state, engine.breaker) == ("ready", None)

    async def test_an_answer_that_ends_before_the_limit_is_whole(self, engines):
        a, _, _ = engines
        a.script = telling(*whole(FRANCE))
        async with proxy_over(a, rules=Rules(total_s=5, idle_s=5)) as proxy, client_of(proxy) as client:
            got, is_clean = await stream(client, CHAT, STREAM)
            assert (text_of(got), is_clean, proxy.last.cause) == (f"{FRANCE} ", True, Cause.ANSWERED)


class TestB12TheEndOfAnAnswerIsNoText:
    @pytest.mark.parametrize("text", ["[DONE]", "data: [DONE]", '"finish_reason": "stop"'])
    async def test_text_like_an_end_that_just_stops_is_not_whole(self, engines, text):
        a, b, _ = engines
        said = chunk(f"The mark\n\n{text}\n\n")
        a.script = telling(said)
        b.script = telling(said, chunk("ends it."), chunk("", "stop"), DONE)
        async with proxy_over(a, b) as proxy, client_of(proxy) as client:
            got, is_clean = await stream(client, CHAT, ASKS[CHAT])
            assert (text_of(got), is_clean) == (f"The mark\n\n{text}\n\nends it.", True)
            assert proxy.last.attempts == ["a", "b"]
