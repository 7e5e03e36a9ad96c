"""Requests passed on to another kvpin: one that hangs, the owner of an engine, the keeper of a response."""

import asyncio
import contextlib
import socket
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve

from engine_adapter import EngineDied, EngineUnavailable, Headers, HttpTransport
from engine_adapter.openai_compatible import ROUTES
from engine_adapter.types import RESPONSES_ROUTES
from proxy.api import relay
from proxy.api.relay import pass_on
from proxy.control.engines import stats
from proxy.core.peers import messages
from proxy.core.quotas import TenantLimits
from proxy.errors import TimeLimit
from proxy.fleet.engine import EngineState
from proxy.peers import peers
from proxy.peers.bus import UnixBus
from proxy.request.calls import Call, Nobody, Reply
from proxy.request.tenants import ApiKey, Tenants
from proxy.request.translate.responses_store import MAX_ID
from tests.fakes import DONE, INFO, FakeAdapter, FakeEngine, client_of, event, is_openai_error, proxy_over
from tests.proxy.peers.reachable import reachable
from tests.proxy.peers.world import until
from tests.proxy.request.objects_world import Objects
from tests.proxy.request.translate.response_world import KEYS, ROUTE, TENANTS, ask, chats

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PIECE = b"9\r\ndata: {}\n\r\n"


class Client(Nobody):
    def __init__(self):
        self.got, self.headers = b"", []

    def start(self, status, headers):
        self.headers = headers

    def write(self, chunk):
        self.got += chunk


@pytest.fixture
async def asked(tmp_path):
    """Passes a request on to a server that sends these pieces, and then nothing."""
    transport, socket = HttpTransport(), str(tmp_path / "socket")
    client = Client()

    async def ask(*pieces):
        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            for each in pieces:
                writer.write(each)
                await asyncio.sleep(0.05)
            await reader.read()
            writer.close()

        call = Call("r", "GET", "/v1/responses/x", Headers([]), None, changed=("half_characters",))
        exchange = SimpleNamespace(method="GET", target=b"/v1/responses/x", headers=Headers([]))
        async with await asyncio.start_unix_server(serve, socket):
            await pass_on(transport, socket, call, exchange, Reply(client), 0.3)

    yield ask, client
    await transport.aclose()


async def test_one_that_never_answers_is_a_time_limit(asked):
    ask, client = asked
    with pytest.raises(
        TimeLimit, match=r"was silent for 0\.3 s, .*\(timeouts\.first_byte_s, limits\.queue_s, "
    ):
        await ask()
    assert client.got == b""


async def test_a_stream_that_stands_still_breaks_off(asked):
    ask, client = asked
    await ask(HEAD, *[PIECE] * 8)  # longer than the limit, in all
    assert (b"x-kvpin-changed", b"half_characters") in client.headers
    assert client.got.startswith(b"data: {}\n" * 8)
    assert b'"code":"time_limit"' in client.got


# --- an engine that only one may use: what the other one is asked goes to its owner

COMPLETIONS = "/v1/completions"
BODY = b'{"model": "m",  "prompt": "caf\xc3\xa9", "max_tokens": 1 }'
KEY = {"authorization": "Bearer key"}


class Owned(FakeAdapter):
    one_owner = True


def slots(engine):
    return Owned("slots", engine.url, replace(INFO, routes=ROUTES))


@pytest.fixture
def bus(tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "SETTLE_S", 0.2)
    monkeypatch.setattr(relay, "WAIT_S", 0.5)
    return lambda owner: UnixBus(tmp_path / "bus", owner)


@contextlib.asynccontextmanager
async def two(bus, engine, *others, is_reachable=True, **options):
    """The owner of an engine, and another proxy, which has further engines. `tenants` may be a function that
    makes those of each."""
    tenants = options.pop("tenants", lambda: Tenants(()))
    made = tenants if callable(tenants) else lambda: tenants
    async with contextlib.AsyncExitStack() as stack:
        options["tenants"] = made()
        owner = await stack.enter_async_context(
            proxy_over(slots(engine), reuse=True, exchange=bus, **options)
        )
        options["tenants"] = made()
        if is_reachable:
            await stack.enter_async_context(reachable(owner))
        else:
            owner.peers.bus.http_socket = None
        await until(owner.fleet.engines["slots"].mine.is_set)
        other = await stack.enter_async_context(proxy_over(*others, reuse=True, exchange=bus, **options))
        other.fleet.add(slots(engine))
        await until(lambda: other.fleet.engines["slots"].state is EngineState.ELSEWHERE)
        yield owner, other


async def test_the_owner_answers_as_if_it_had_been_asked(bus, engine):
    tenants = Tenants([ApiKey.of("key", "t")], {})
    async with two(bus, engine, tenants=tenants) as (owner, other), client_of(other, headers=KEY) as client:
        sent = {"content-type": "application/json", "x-request-id": "mine", "openai-organization": "o"}
        answer = await client.post(COMPLETIONS, content=BODY, headers=sent)
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["x-kvpin-engine"] == "slots"
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "m"
        assert (await client.get("/v1/models/m")).json()["id"] == "m"
        wrong = await client.post(COMPLETIONS, content=BODY, headers={"authorization": "Bearer no"})
        assert is_openai_error(wrong, 401)
        assert (await client.get("/health/ready")).json()["elsewhere"]["slots"].startswith("used through the")
        name = owner.peers.name
        told = await stats(other.fleet, [], other.peers, reuse=True)
        (unconnected,) = told.unconnected
        assert (unconnected.last_error, unconnected.owner) == (None, name)
        assert (told.totals.elsewhere, told.passed_on) == (1, {name: 1})
    assert owner.last.tenant == "t"
    assert list(other.requests) == []
    (seen,) = engine.seen
    assert BODY[:-2] in seen.body  # the tenant's salt comes after it
    assert seen.headers["openai-organization"] == "o"


async def test_who_is_asked_counts_the_request_and_the_owner_its_tokens(bus, engine, stream):
    def tenants():
        limits = TenantLimits(tokens_per_minute=1000, concurrent_requests=1)
        return Tenants([ApiKey.of("key", "t")], {"t": limits})

    async with two(bus, engine, tenants=tenants) as (owner, other), client_of(other, headers=KEY) as client:
        used = [proxy.tenants.quota("t") for proxy in (owner, other)]
        async with client.stream("POST", COMPLETIONS, json=STREAM) as answer:
            await anext(answer.aiter_bytes())
            assert [quota._running for quota in used] == [0, 1]
            refused = await client.post(COMPLETIONS, content=BODY)
            assert is_openai_error(refused, 429, "rate_limit_exceeded")
            assert (other.last.status, len(engine.seen)) == (429, 1)
            stream.set()
        await owner.settled()
        assert [quota._running for quota in used] == [0, 0]
        assert owner.last.tenant == "t"
        await until(lambda: used[1]._tokens._left < 1000)  # the owner has told of the tokens


async def test_errors_and_uploads_pass_as_they_are(bus, engine):
    async def refuse(exchange):
        await exchange.send({"error": {"message": "no", "param": "n"}}, status=400)

    async def take(exchange):
        await exchange.send({"text": "heard"})

    engine.script = take
    async with two(bus, engine) as (_, other), client_of(other) as client:
        files = {"file": ("a.wav", b"sound" * 1000), "model": (None, "m")}
        assert (await client.post("/v1/audio/transcriptions", files=files)).status_code == 200
        engine.script = refuse
        assert is_openai_error(await client.post(COMPLETIONS, content=BODY), 400, param="n")
        assert is_openai_error(await client.post(COMPLETIONS, content=b"{"), 400)
    assert b"sound" * 1000 in engine.seen[0].body


@pytest.fixture
def stream(engine):
    """The engine streams one event, and the rest when this is set."""
    more = asyncio.Event()

    async def script(exchange):
        await exchange.start()
        await exchange.chunk(event({"choices": [{"text": "x"}]}))
        await more.wait()
        await exchange.chunk(DONE)
        await exchange.end()

    engine.script = script
    return more


STREAM = {"model": "m", "prompt": "a", "stream": True}


async def test_a_stream_passes_as_it_comes_and_ends_with_its_client(bus, engine, stream):
    async with two(bus, engine) as (owner, other), client_of(other) as client:
        async with client.stream("POST", COMPLETIONS, json=STREAM) as answer:
            assert (await anext(answer.aiter_bytes())).startswith(b"data: ")
            assert owner.fleet.engines["slots"].ledger.in_flight == 1
        await owner.settled()
        assert owner.last.status == 499
        stream.set()
        whole = await client.post(COMPLETIONS, json=STREAM)
        assert whole.content.endswith(b"data: [DONE]\n\n")


async def test_a_websocket_passes_both_ways(bus):
    async def echo(connection):
        async for message in connection:
            await connection.send(message)

    async with serve(echo, "127.0.0.1", 0) as server:
        engine = SimpleNamespace(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with two(bus, engine) as (owner, other):
            url = f"{other.url.replace('http', 'ws', 1)}/v1/realtime?model=m"
            async with connect(url, proxy=None) as client:
                for message in ("hello", b"\x00" * 300_000):
                    await client.send(message)
                    assert await client.recv() == message
                assert owner.fleet.engines["slots"].ledger.in_flight == 1
            await owner.settled()


async def test_a_request_stays_here_where_an_engine_of_its_model_does(bus, engine, other):
    async with two(bus, engine, other) as (_, second), client_of(second) as client:
        assert (await client.post(COMPLETIONS, content=BODY)).headers["x-kvpin-engine"] == "b"
        assert is_openai_error(
            await client.post(COMPLETIONS, json={"model": "n", "prompt": "a"}), 404, "model_not_found"
        )
    assert engine.seen == []


async def test_it_goes_to_the_owner_of_its_model_where_there_are_other_engines_too(bus, engine, other):
    adapter = FakeAdapter("b", other.url, model="n")
    async with two(bus, engine, adapter, aliases={"alias": "m"}) as (_, second), client_of(second) as client:
        for name in ("m", "alias"):
            answer = await client.post(COMPLETIONS, json={"model": name, "prompt": "a"})
            assert answer.headers["x-kvpin-engine"] == "slots"
        names = [each["id"] for each in (await client.get("/v1/models")).json()["data"]]
        assert set(names) == {"m", "n"}
    assert other.seen == []


@pytest.mark.parametrize("takes", ["default_model", "any_model"])
async def test_it_goes_to_the_owner_of_its_model_where_an_engine_here_takes_other_names(
    bus, engine, other, takes
):
    adapter = FakeAdapter("b", other.url, replace(INFO, any_model=takes == "any_model"), model="n")
    options = {"aliases": {"alias": "m"}, "default_model": "n" if takes == "default_model" else None}
    async with two(bus, engine, adapter, **options) as (_, second), client_of(second) as client:
        for name, served_by in (("m", "slots"), ("alias", "slots"), ("n", "b"), ("x", "b")):
            answer = await client.post(COMPLETIONS, json={"model": name, "prompt": "a"})
            assert answer.headers["x-kvpin-engine"] == served_by
    async with two(bus, engine, adapter, is_reachable=False) as (_, second), client_of(second) as client:
        assert is_openai_error(await client.post(COMPLETIONS, content=BODY), 503, "no_engine")


async def test_what_was_passed_on_is_not_passed_on_again(bus, engine):
    async with two(bus, engine) as (_, other), reachable(other):
        transport = httpx.AsyncHTTPTransport(uds=str(other.peers.bus.http_socket))
        async with httpx.AsyncClient(transport=transport, base_url="http://kvpin") as peer:
            answer = await peer.post(COMPLETIONS, content=BODY)
            assert is_openai_error(answer, 503, "no_engine")
            assert answer.headers["retry-after"] == "1"
    assert engine.seen == []


async def test_an_owner_that_cannot_be_reached_is_named(bus, engine):
    async with two(bus, engine, is_reachable=False) as (owner, other), client_of(other) as client:
        answer = await client.post(COMPLETIONS, content=BODY)
        assert is_openai_error(answer, 503, "no_engine")
        assert f"send them to the kvpin {owner.peers.name}" in answer.text
        await until(lambda: owner.peers.is_ready)
        ready = await client.get("/health/ready")
        assert ready.status_code == 503
        assert (ready.json()["engines"], ready.json()["exchange"]) == ({"slots": "elsewhere"}, "ok")
        assert owner.peers.name in ready.json()["elsewhere"]["slots"]


async def test_an_owner_that_goes_away_is_a_503_and_a_broken_stream_says_so(bus, engine, stream):
    async with two(bus, engine) as (owner, other), client_of(other) as client:
        await until(lambda: other.peers.is_ready)
        assert (await client.get("/health/ready")).status_code == 200
        async with client.stream("POST", COMPLETIONS, json=STREAM) as answer:
            chunks = answer.aiter_bytes()
            await anext(chunks)
            owner.peers.bus.http_socket.unlink()
            break_passed_on(other, EngineUnavailable)
            rest = b""
            with contextlib.suppress(httpx.RemoteProtocolError):
                async for chunk in chunks:
                    rest += chunk
            assert b"the connection broke" in rest
        answer = await client.post(COMPLETIONS, content=BODY)
        assert is_openai_error(answer, 503, "no_engine")
        assert answer.headers["retry-after"] == "1"
        stream.set()
        await owner.settled()


async def test_a_request_waits_while_the_engine_changes_hands(bus, engine, monkeypatch):
    monkeypatch.setattr(relay, "WAIT_S", 20)
    async with two(bus, engine) as (owner, other), client_of(other) as client:
        slots = other.fleet.engines["slots"]
        owner.peers.bus.http_socket.unlink()
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(client.post(COMPLETIONS, content=BODY)),
                group.create_task(client.get("/v1/models")),
            ]
            await asyncio.sleep(0.1)
            await owner.peers.aclose()
            await until(slots.mine.is_set)
            assert not any(task.done() for task in asked)
            gets_the_engine(other)
        first, second = [task.result() for task in asked]
        assert first.headers["x-kvpin-engine"] == "slots"
        assert [each["id"] for each in second.json()["data"]] == ["m"]


def break_passed_on(proxy, error=EngineDied):
    """The connections break on which requests were passed on."""
    (origin,) = [each for each in proxy.transport._origins.values() if each._unix]
    for connection in list(origin._open):
        connection.fail(error("the connection broke"))


def gets_the_engine(proxy):
    """The proxy has connected to the engine, of which it is the owner now."""
    slots = proxy.fleet.engines["slots"]
    proxy.fleet.join(slots, INFO)
    slots.state = EngineState.READY


@pytest.fixture
def never(engine):
    """The engine answers no request until the second of these is called; the first tells each that came."""
    answer, reached = engine.script, asyncio.Queue()

    async def hang(_exchange):
        reached.put_nowait(None)
        await asyncio.Event().wait()

    engine.script = hang

    def recover():
        engine.script = answer

    return reached, recover


@pytest.fixture
def silent(monkeypatch):
    """Makes an owner say nothing more, while its connections stay open, as if its process were stopped."""
    monkeypatch.setattr(peers, "HEARTBEAT_S", 0.1)

    def silence(owner):
        monkeypatch.setattr(peers, "LOST_S", 0.5)  # not before: a busy machine is silent for longer
        owner.peers._is_over = True

    return silence


@pytest.mark.parametrize("owner_is", ["dead", "hanging"])
async def test_a_request_without_an_answer_goes_to_the_next_owner(
    bus, engine, never, silent, monkeypatch, owner_is
):
    monkeypatch.setattr(relay, "WAIT_S", 20)
    reached, recover = never
    async with two(bus, engine) as (owner, other), client_of(other) as client:
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(client.post(COMPLETIONS, content=BODY))
            await reached.get()
            recover()
            if owner_is == "hanging":
                silent(owner)
            else:
                owner.peers.bus.http_socket.unlink()
                break_passed_on(other)
                await owner.peers.aclose()
            await until(other.fleet.engines["slots"].mine.is_set)
            gets_the_engine(other)
        assert asked.result().headers["x-kvpin-engine"] == "slots"
        assert [record.engine for record in other.requests] == ["slots"]


async def test_a_request_that_its_owner_dies_of_twice_fails(bus, engine, never, monkeypatch):
    monkeypatch.setattr(relay, "WAIT_S", 20)
    reached, _ = never
    async with two(bus, engine) as (_, other), client_of(other) as client, asyncio.TaskGroup() as group:
        asked = group.create_task(client.post(COMPLETIONS, content=BODY))
        for _ in range(2):
            await reached.get()
            break_passed_on(other)
        assert is_openai_error(await asked, 503, "no_engine")
    assert len(engine.seen) == 2


# --- each serves the responses, and reaches those of engines, of the others

COUNTS = f"{ROUTE}/input_tokens"
N = 3


@contextlib.asynccontextmanager
async def several(tmp_path, engine, served_as_chats=RESPONSES_ROUTES, tenants=TENANTS):
    """Proxies before one engine, and a client of each."""
    async with contextlib.AsyncExitStack() as stack:
        proxies = []
        for _ in range(N):
            adapter = FakeAdapter("a", engine.url, replace(INFO, served_as_chats=served_as_chats))
            options = {"tenants": tenants, "exchange": lambda owner: UnixBus(tmp_path / "bus", owner)}
            proxies.append(await stack.enter_async_context(proxy_over(adapter, **options)))
            await stack.enter_async_context(reachable(proxies[-1]))
        await until(lambda: all(len(each.peers.sockets()) == N - 1 for each in proxies))
        clients = [await stack.enter_async_context(client_of(each)) for each in proxies]
        yield proxies, clients


@pytest.fixture
async def many(tmp_path, engine):
    engine.script = chats
    async with several(tmp_path, engine) as world:
        yield world


async def test_a_conversation_goes_on_at_any_kvpin(many, engine):
    proxies, (one, two, three) = many
    first = (await ask(one)).json()
    second = (await ask(two, previous_response_id=first["id"], input="more")).json()
    assert [message["content"] for message in engine.seen[-1].json["messages"]] == ["hi", "hi", "more"]
    assert second["previous_response_id"] == first["id"]
    third = await ask(three, previous_response_id=second["id"], input="on", stream=True)
    assert "event: response.completed" in third.text
    assert len(engine.seen[-1].json["messages"]) == 5
    assert [len(list(each.requests)) for each in proxies] == [3, 0, 0]


async def test_a_response_is_read_listed_and_deleted_at_any_kvpin(many):
    _, (one, two, three) = many
    made = (await ask(one)).json()
    address = f"{ROUTE}/{made['id']}"
    assert (await two.get(address, headers=KEYS["a"])).json() == made
    items = (await three.get(f"{address}/input_items?limit=1", headers=KEYS["a"])).json()
    assert items["data"][0]["content"][0]["text"] == "hi"
    asked = {"model": "m", "input": "x", "previous_response_id": made["id"]}
    assert (await two.post(COUNTS, json=asked, headers=KEYS["a"])).status_code != 404
    assert (await three.delete(address, headers=KEYS["a"])).json()["deleted"] is True
    for client in (one, two, three):
        assert is_openai_error(await client.get(address, headers=KEYS["a"]), 404)


async def test_another_tenant_cannot_tell_that_it_is_there(many, engine):
    _, (one, two, _) = many
    made = (await ask(one)).json()["id"]
    for method in ("GET", "DELETE", "HEAD"):
        answers = [
            await two.request(method, f"{ROUTE}/{name}", headers=KEYS["b"]) for name in (made, "resp_none")
        ]
        assert {answer.status_code for answer in answers} == {404}
        assert answers[0].text.replace(made, "ID") == answers[1].text.replace("resp_none", "ID")
    refused = await ask(two, "b", previous_response_id=made)
    assert is_openai_error(refused, 404, param="previous_response_id")
    assert len(engine.seen) == 1
    assert (await one.get(f"{ROUTE}/{made}", headers=KEYS["a"])).status_code == 200


async def test_nobody_is_asked_for_an_id_that_is_longer_than_any(many, monkeypatch):
    """Its length is that of the body: it would be the address of a request to each kvpin."""

    async def found(*_):
        raise AssertionError("asked")

    monkeypatch.setattr(relay.PassedToKeeper, "_find", found)
    _, (one, *_) = many
    named = "x" * (MAX_ID + 1)
    assert is_openai_error(await ask(one, previous_response_id=named), 404, param="previous_response_id")


async def test_a_response_of_an_engine_is_found_by_who_got_it(tmp_path, engine):
    async def respond(exchange):
        await exchange.send({"id": "resp_engine", "object": "response", "output": []})

    engine.script = respond
    other = FakeEngine("b", respond)
    async with other, several(tmp_path, engine, frozenset()) as (proxies, (one, two, _)):
        made = (await ask(one)).json()["id"]
        for proxy in proxies:
            proxy.add(FakeAdapter("b", other.url, INFO))  # a request without a home may go there
        for _ in range(4):
            assert (await ask(two, previous_response_id=made)).status_code == 200
            assert (await two.get(f"{ROUTE}/{made}", headers=KEYS["a"])).status_code == 200
            assert is_openai_error(await two.get(f"{ROUTE}/{made}", headers=KEYS["b"]), 404)
        assert not other.seen


async def test_what_a_kvpin_kept_is_gone_with_it(many):
    proxies, (one, two, three) = many
    gone, kept = [(await ask(client)).json()["id"] for client in (one, three)]
    proxies[0].peers.bus.http_socket.unlink()
    assert is_openai_error(await two.get(f"{ROUTE}/{gone}", headers=KEYS["a"]), 404)
    assert is_openai_error(await ask(two, previous_response_id=gone), 404, param="previous_response_id")
    assert (await ask(two, previous_response_id=kept)).status_code == 200


async def test_a_kvpin_that_hangs_is_not_waited_for(many, monkeypatch):
    monkeypatch.setattr(relay, "ASK_S", 0.2)
    proxies, (_, two, three) = many
    kept = (await ask(three)).json()["id"]
    path = proxies[0].peers.bus.http_socket
    path.unlink()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        assert (await ask(two, previous_response_id=kept)).status_code == 200
        assert is_openai_error(await two.get(f"{ROUTE}/resp_none", headers=KEYS["a"]), 404)


async def test_one_tenant_asks_for_responses_only(tmp_path, engine):
    engine.script = objects = Objects()
    async with several(tmp_path, engine, frozenset(), Tenants(())) as (_, (one, two, _)):
        name = objects.make("files")["id"]
        assert (await two.get(f"/v1/files/{name}")).json()["id"] == name
        response = (await one.post(ROUTE, json={"model": "m", "input": "x"})).json()["id"]
        assert (await two.get(f"{ROUTE}/{response}")).json()["id"] == response
