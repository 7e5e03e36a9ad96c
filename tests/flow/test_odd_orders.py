"""Events of a request's life in odd orders, over real sockets: engines that leave in mid-stream, limits that
strike in the moment of something else, clients that do not read."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from engine_adapter import EngineUnavailable
from engine_adapter.types import MESSAGES_ROUTES, RESPONSES_ROUTES
from proxy.core.life import Cause, Rules
from proxy.fleet.engine import EngineState
from tests.fakes import (
    ASK,
    CHAT,
    INFO,
    STREAM,
    FakeAdapter,
    answer,
    asked,
    client_of,
    is_openai_error,
    post,
    proxy_over,
)
from tests.flow.test_lives import ASKS, FRANCE, chunk, stream, text_of, whole, words
from tests.kv_world import until
from tests.scripts import dies, hangs, streams

GREEDY = ASKS[CHAT]


class TestAnEngineThatIsRemovedWhileItAnswers:
    @pytest.mark.parametrize("others", [1, 2])
    async def test_another_goes_on_without_repeating_anything(self, engines, others):
        a, b, c = engines
        removed = asyncio.Event()

        async def script(exchange):
            await exchange.start()
            for part in words("The capital of"):
                await exchange.chunk(part)
            await removed.wait()
            exchange.die()

        a.script, b.script, c.script = script, streams(*whole(FRANCE)), streams(*whole(FRANCE))
        async with proxy_over(*engines[: 1 + others]) as proxy, client_of(proxy) as client:
            asking = asyncio.create_task(stream(client, CHAT, GREEDY))
            await a.request()
            await asyncio.sleep(0.05)
            proxy.fleet.remove(proxy.fleet.engine("a"))
            removed.set()
            got, is_clean = await asking
            assert (text_of(got), is_clean) == (f"{FRANCE} ", True)
            assert proxy.last.cause is Cause.ANSWERED


class TestAnAnswerWithoutItsLastByte:
    async def test_is_whole_if_the_client_has_its_end(self):
        async with asked(hangs(*whole(FRANCE)), rules=Rules(idle_s=0.1)) as (proxy, client, _):
            got, is_clean = await stream(client, CHAT, STREAM)
            assert (text_of(got), is_clean) == (f"{FRANCE} ", True)
            assert (proxy.last.cause, proxy.last.status, proxy.last.error) == (Cause.ANSWERED, 200, None)
            assert proxy.last.output_tokens is None


@asynccontextmanager
async def _small_socket(proxy):
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", httpx.URL(proxy.url).port))
        sock.setblocking(False)
        yield sock


BIG = chunk("x" * 1000) * 1000


class TestAClientThatDoesNotRead:
    async def test_its_request_ends_at_the_limit(self, engines):
        a, _, _ = engines

        async def script(exchange):
            await exchange.start()
            while True:
                await exchange.chunk(BIG)

        a.script = script
        rules = Rules(total_s=0.3, idle_s=0.1)
        async with proxy_over(a, rules=rules) as proxy, _small_socket(proxy) as sock:
            sent = post(CHAT, json.dumps(STREAM).encode())
            await asyncio.get_running_loop().sock_sendall(sock, sent)
            await until(lambda: list(proxy.requests))
            assert proxy.last.cause is Cause.OUR_LIMIT
            await proxy.settled()

    async def test_what_follows_a_whole_answer_on_its_connection_is_not_disturbed(self, engines):
        """The limit strikes when all of the answer was sent, and waits for its client."""
        a, _, _ = engines
        size = 8 << 20

        async def script(exchange):
            long = {"choices": [{"text": "x" * size}]}
            await (exchange.send(long) if exchange.json["n"] == 1 else answer(exchange))

        a.script = script
        loop = asyncio.get_running_loop()
        async with proxy_over(a, rules=Rules(total_s=4)) as proxy, _small_socket(proxy) as sock:
            for number in (1, 2):
                sent = post("/v1/completions", json.dumps({**ASK, "n": number, "prompt": "x"}).encode())
                await loop.sock_sendall(sock, sent.replace(b"connection: close\r\n", b""))
                await until(lambda number=number: len(list(proxy.requests)) >= number)
                assert (proxy.last.cause, proxy.last.status) == (Cause.ANSWERED, 200)
                got = b""
                while b"\r\n\r\n" not in got:
                    got += await asyncio.wait_for(loop.sock_recv(sock, 1 << 10), 5)
                head, _, body = got.partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 ")
                (length,) = (line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
                while len(body) < int(length.partition(b":")[2]):
                    body += await asyncio.wait_for(loop.sock_recv(sock, 1 << 20), 5)
                assert len(body) == int(length.partition(b":")[2])


class TestTheTotalLimit:
    async def test_strikes_a_request_that_waits_for_an_engine(self):
        async with asked(answer, rules=Rules(total_s=0.1), wait_s=60) as (proxy, client, a):
            proxy.fleet.engines["a"].state = EngineState.DOWN
            response = await client.post(CHAT, json=ASK)
            assert is_openai_error(response, 504, "time_limit")
            said = "the request took longer than 0.1 s, kvpin's limit (timeouts.total_s)"
            assert response.json()["error"]["message"] == said
            assert (proxy.last.cause, a.seen) == (Cause.OUR_LIMIT, [])

    async def test_the_error_names_the_limit_that_was_exceeded(self):
        rules = Rules(first_byte_s=0.1, total_s=60, queue_s=0)
        async with asked(answer, rules=rules, wait_s=60) as (proxy, client, _):
            proxy.fleet.engines["a"].state = EngineState.DOWN
            response = await client.post(CHAT, json=ASK)
            assert response.json()["error"]["message"] == (
                "the request reached no engine within 0.1 s (timeouts.first_byte_s + limits.queue_s)"
            )

    @pytest.mark.parametrize("path", ASKS)
    async def test_ends_a_stream_of_any_api_with_an_error(self, engines, path):
        a, b, _ = engines
        a.script = b.script = hangs(*words(FRANCE))
        info = replace(INFO, served_as_chats=MESSAGES_ROUTES | RESPONSES_ROUTES)
        adapters = [FakeAdapter(each.id, each.url, info) for each in (a, b)]
        async with proxy_over(*adapters, rules=Rules(total_s=1.0)) as proxy, client_of(proxy) as client:
            got, is_clean = await stream(client, path, ASKS[path])
            assert (text_of(got), is_clean) == (f"{FRANCE} ", False)
            assert (
                b"the request took longer than 1 s" in got.splitlines()[-2 if got.endswith(b"\n\n") else -1]
            )
            assert (proxy.last.cause, proxy.last.attempts) == (Cause.OUR_LIMIT, ["a"])
            assert proxy.fleet.engines["a"].state is EngineState.READY
            await proxy.settled()


class TestAnAttemptThatIsInterrupted:
    async def test_its_hold_fails_to_end(self, engines):
        """The hold's error takes the place of the interruption: the next attempt still has its limits."""
        a, b, _ = engines
        a.script, b.script = hangs(), hangs(*words("The capital"))

        class Failing(FakeAdapter):
            @asynccontextmanager
            async def hold(self, *given):
                async with super().hold(*given) as hold:
                    try:
                        yield hold
                    except asyncio.CancelledError:
                        raise EngineUnavailable("the slot was not saved") from None

        rules = Rules(first_byte_s=1, idle_s=0.3)
        async with proxy_over(Failing("a", a.url), b, rules=rules, reuse=True) as proxy:
            async with client_of(proxy) as client:
                got, is_clean = await asyncio.wait_for(stream(client, CHAT, STREAM), 5)
            assert (text_of(got), is_clean) == ("The capital ", False)
            assert (proxy.last.attempts, proxy.last.cause) == (["a", "b"], Cause.ENGINE_SILENT)


class TestOnePartOfSeveral:
    @pytest.mark.parametrize("rest", [FRANCE, "The capital city"])
    async def test_goes_on_elsewhere_while_the_other_is_served(self, engines, rest):
        """Where no engine tells the same text, the whole answer breaks off."""
        scripts = iter([dies(*words("The capital of"), pause_s=0.02), streams(*whole(FRANCE), pause_s=0.05)])

        async def script(exchange):
            await next(scripts, streams(*whole(rest)))(exchange)

        for engine in engines:
            engine.script = script
        info = replace(INFO, runs_several=False)
        adapters = [FakeAdapter(each.id, each.url, info) for each in engines[: 3 if rest == FRANCE else 2]]
        async with proxy_over(*adapters) as proxy, client_of(proxy) as client:
            got, is_clean = await stream(client, CHAT, {**GREEDY, "n": 2})
            events = [json.loads(line[6:]) for line in got.split(b"\n") if line.startswith(b"data: {")]
            choices = [each["choices"][0] for each in events if each.get("choices")]
            texts = [
                "".join(each["delta"].get("content") or "" for each in choices if each["index"] == index)
                for index in (0, 1)
            ]
            assert is_clean is (rest == FRANCE)
            if is_clean:
                assert texts == [f"{FRANCE} ", f"{FRANCE} "]
            else:
                assert all(f"{FRANCE} ".startswith(text) for text in texts)
                assert b"[DONE]" not in got
            await proxy.settled()
            assert proxy.flow.attempts.room.used == 0


class TestAClientThatLeaves:
    async def test_while_another_engine_goes_on(self):
        said = words("The capital")
        async with asked(dies(*said), hangs(*said)) as (proxy, client, _, b):
            asking = asyncio.create_task(stream(client, CHAT, GREEDY))
            exchange = await b.request()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await asyncio.wait_for(exchange.left.wait(), 5)
            await until(lambda: list(proxy.requests))
            assert (proxy.last.cause, proxy.last.status) == (Cause.CLIENT_LEFT, 499)
            assert proxy.flow.attempts.room.used == 0
            await proxy.settled()
