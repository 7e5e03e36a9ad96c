"""A scripted engine and a proxy in front of it, both on real sockets, for tests of the data plane.

`FakeEngine` speaks HTTP/1.1 by hand, so that a script decides about every byte, pause and death.
"""

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import httpx
import uvicorn
from starlette.applications import Starlette

from engine_adapter import EngineInfo, EngineLoad, EngineSpec, HttpTransport, Role
from engine_adapter.off_loop import JsonSize
from engine_adapter.openai_compatible import OpenAICompatibleAdapter
from engine_adapter.prompt.chat import ChatTokenizer
from proxy.api.auth import Cors
from proxy.api.dispatch import Dispatcher, Ops
from proxy.api.openai import DataPlane
from proxy.api.own_answers import KeptResponses, handle
from proxy.api.relay import PassedToKeeper, PassedToOwner
from proxy.core.life import Rules
from proxy.core.quotas import ByteBudget
from proxy.errors import ANSWERED
from proxy.fleet.destinations import Destinations
from proxy.fleet.engine import Engine, EngineState
from proxy.fleet.fleet import Fleet
from proxy.fleet.ingest import Ingest
from proxy.fleet.pool import Pool
from proxy.flow import Flow
from proxy.http.http1 import Http1Protocol
from proxy.observe.metrics import Metrics
from proxy.peers.bus import Bus as PeerExchange
from proxy.peers.peers import Peers
from proxy.prompt import FormTable, MediaUuids, PromptBuilder, RegisteredTables
from proxy.request.gate import Gate
from proxy.request.normalising import NO_RULES, Normalising
from proxy.request.records import RequestRecords
from proxy.request.tenants import Tenants
from proxy.request.translate import ResponseStore, Translate, translations
from proxy.runtime import Supervisor
from proxy.settings import LimitSettings
from proxy.steps.attempt import Attempts
from proxy.steps.preparation import Preparation
from tests.engines import QuickServer
from tests.ports import opened, port_of

CHAT = "/v1/chat/completions"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**ASK, "stream": True}
DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 32}}
ANSWER = {
    "id": "chatcmpl-1",
    "choices": [{"message": {"role": "assistant", "content": "hi"}}],
    "usage": USAGE,
}


class Exchange:
    """One request an engine received, and its way back."""

    def __init__(self, connection: "_Connection", method: str, target: str, headers: list[tuple[str, str]]):
        self.method, self.target, self.raw_headers = method, target, headers
        self.headers = dict(headers)
        self.body = b""
        self.left = asyncio.Event()  # the peer went away
        self.ended = False
        self._connection = connection

    @property
    def json(self):
        return json.loads(self.body)

    async def receive(self, text: bytes):
        """Takes bytes off the wire until `text` has come, for scripts that read their body themselves."""
        buffer = self._connection._buffer
        await self._connection._until(lambda: buffer.find(text) + len(text) if text in buffer else -1)

    async def start(self, status=200, headers=(("content-type", "text/event-stream"),)):
        lines = [f"HTTP/1.1 {status} Whatever", *(f"{n}: {v}" for n, v in headers)]
        self._chunked = not any(n == "content-length" for n, _ in headers)
        if self._chunked:
            lines.append("transfer-encoding: chunked")
        await self._connection.write("\r\n".join([*lines, "", ""]).encode())

    async def chunk(self, data: bytes):
        await self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def end(self):
        self.ended = True
        await self._connection.write(b"0\r\n\r\n" if self._chunked else b"")

    async def send(self, content, status=200, headers=()):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        kind = () if any(n == "content-type" for n, _ in headers) else (("content-type", "application/json"),)
        await self.start(status, (*kind, ("content-length", str(len(data))), *headers))
        await self.chunk(data)
        self.ended = True

    async def stream(self, *chunks: bytes):
        await self.start()
        for data in chunks:
            await self.chunk(data)
        await self.end()

    @property
    def port(self) -> int:
        return self._connection.transport.get_extra_info("peername")[1]

    def die(self, *, abort=False):
        self.ended = True
        transport = self._connection.transport
        transport.abort() if abort else transport.close()


Script = Callable[[Exchange], Awaitable[None]]


async def answer(exchange: Exchange) -> None:
    """What a well engine says."""
    if exchange.target == "/health":
        await exchange.send({"status": "ok"})
    elif exchange.target == "/v1/models":
        await exchange.send({"data": [{"id": "m", "max_model_len": 4096}]})
    elif exchange.body and exchange.json.get("stream"):
        await exchange.stream(event({"choices": [{"delta": {"content": "hi"}}]}), b"data: [DONE]\n\n")
    else:
        await exchange.send(ANSWER)


def event(content) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


class _Connection(asyncio.Protocol):
    """HTTP/1.1 with keep-alive, for well-formed requests."""

    def __init__(self, engine: "FakeEngine"):
        self._engine = engine
        self._buffer = bytearray()
        self._data = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self.lost = False
        self.exchange: Exchange | None = None

    def connection_made(self, transport):
        if not self._engine.is_up:
            transport.abort()  # it was accepted just before, and nobody would close it
            return
        self.transport = transport
        self._engine.connections.append(self)
        self._task = asyncio.get_running_loop().create_task(self._serve())

    def data_received(self, data):
        self._buffer += data
        self._data.set()

    def pause_writing(self):
        self._room.clear()

    def resume_writing(self):
        self._room.set()

    def connection_lost(self, _exc):
        self.lost = True
        self._data.set()
        self._room.set()
        if self.exchange is not None and not self.exchange.ended:
            self.exchange.left.set()

    async def write(self, data: bytes):
        await self._room.wait()
        # A script that writes without end leaves the loop no time to tell that the connection is lost.
        if self.lost or self.transport.is_closing():
            raise ConnectionResetError
        self.transport.write(data)

    async def _until(self, end: Callable[[], int]) -> bytes:
        """Bytes up to the index that `end` gives; -1 asks for more."""
        while (at := end()) < 0:
            if self.lost:
                raise ConnectionResetError
            self._data.clear()
            await self._data.wait()
        data = bytes(self._buffer[:at])
        del self._buffer[:at]
        return data

    async def _take(self, size: int) -> bytes:
        return await self._until(lambda: size if len(self._buffer) >= size else -1)

    async def _line(self) -> bytes:
        return await self._until(
            lambda: self._buffer.find(b"\r\n") + 2 or -1 if b"\r\n" in self._buffer else -1
        )

    async def _serve(self):
        with contextlib.suppress(ConnectionResetError), contextlib.closing(self.transport):
            while True:
                method, target, _ = (await self._line()).decode("latin-1").split(" ")
                headers = []
                while (line := (await self._line()).decode("latin-1").strip()) != "":
                    name, _, value = line.partition(":")
                    headers.append((name.lower(), value.strip()))
                exchange = self.exchange = Exchange(self, method, target, headers)
                self._engine.seen.append(exchange)
                self._engine.arrived.set()
                script = self._engine.script
                if not getattr(script, "reads_body", True):
                    await script(exchange)
                    continue
                if "transfer-encoding" in exchange.headers:
                    while size := int(await self._line(), 16):
                        exchange.body += (await self._take(size + 2))[:-2]
                    await self._line()
                elif length := int(exchange.headers.get("content-length", 0)):
                    exchange.body = await self._take(length)
                await script(exchange)


class FakeEngine:
    """An engine whose answers `script` writes. `seen` has the requests it received."""

    def __init__(self, engine_id="a", script: Script = answer):
        self.id = engine_id
        self.script = script
        self.seen: list[Exchange] = []
        self.connections: list[_Connection] = []
        self.arrived = asyncio.Event()

    async def __aenter__(self):
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_):
        await self.stop()

    @property
    def is_up(self) -> bool:
        return self._server.is_serving()

    async def stop(self):
        self._server.close()
        for connection in self.connections:
            connection.transport.abort()
            connection._task.cancel()
        await asyncio.gather(*(c._task for c in self.connections), return_exceptions=True)

    async def request(self, number=0) -> Exchange:
        """The request of that number, once it is here."""
        while len(self.seen) <= number:
            self.arrived.clear()
            await asyncio.wait_for(self.arrived.wait(), 60)
        return self.seen[number]


INFO = EngineInfo(model="m", instance="i1", capabilities=frozenset(), tokens_per_block=16, gpu_blocks=64)


class FakeAdapter(OpenAICompatibleAdapter):
    """The generic adapter with an `info`, an event stream and a cached-tokens header of the test's making."""

    def __init__(self, engine_id="a", url="http://127.0.0.1:1", info=INFO, **options):
        self.spec = EngineSpec("openai_compatible", url, engine_id, **options)  # nothing of it is called
        self._own_headers = []
        self.info = info
        self.feed: asyncio.Queue = asyncio.Queue()
        self.failures: list[Exception] = []  # raised by the next calls of connect and load
        self.subscriptions = self.checks = 0
        self.checked = asyncio.Event()
        self.tables = []
        self.since = self.position = None

    def event_position(self):
        return self.position

    def on_closed(self, call):
        self.closes = call

    def cached_tokens(self, headers):
        value = headers.get("x-kv-cached-tokens")
        return None if value is None else int(value)

    async def connect(self):
        self._note()
        return self.info

    async def load(self):
        self._note()
        return EngineLoad(running=0, waiting=0)

    async def events(self, since=None):
        self.subscriptions += 1
        self.since = since
        while True:
            item = await self.feed.get()
            if isinstance(item, Exception):
                raise item
            yield item

    async def put_prompt_table(self, table):
        self.tables.append(table)

    async def aclose(self):
        pass

    def _note(self):
        self.checks += 1
        self.checked.set()
        if self.failures:
            raise self.failures.pop(0)


def prompts_of(info: EngineInfo, *, tables: RegisteredTables | None = None, **engines) -> PromptBuilder:
    """A builder that tokenises with the engine's tokenizer from the start, unchecked."""
    builder = PromptBuilder(info, tables=tables or RegisteredTables(), **engines)
    if info.tokenizer is not None:
        builder.adopt(ChatTokenizer.load(info.tokenizer))
        use_unchecked(builder)
    return builder


def use_unchecked(builder: PromptBuilder) -> None:
    """From now on prompts are made with the tokenizer that was adopted."""
    builder.forms = FormTable(can_ask=builder.can_ask, detail=builder.reason)
    builder.forms.make_here("unchecked: the engine has no route to check", alike=builder.info.renders_alike)
    builder.forms.lost_shapes = builder.local.lost_shapes


def give_prompts(pool: Pool, builder: PromptBuilder) -> None:
    """Lets all engines of a pool have this builder, as if each was compared."""
    for engine in pool.engines.values():
        pool.render(engine, builder, is_proven=True)


def is_tokenised(proxy) -> bool:
    """Whether the tokenizers of a proxy's pools were loaded and checked."""
    return not any(name.startswith("tokenizer ") for name in proxy.tasks._tasks)


def add_ready(fleet: Fleet, engine_id: str, *, model=None, role=Role.BOTH, **info) -> Engine:
    """An engine of the fleet that takes requests, with changes of INFO."""
    adapter = FakeAdapter(engine_id, model=model, role=role)
    engine = fleet.add(adapter)
    fleet.join(engine, replace(INFO, **info))
    engine.state = EngineState.READY
    return engine


@contextlib.asynccontextmanager
async def serving(
    app, listener: socket.socket | None = None, *, is_of_peer: bool = False
) -> AsyncIterator[str]:
    """A site of kvpin's or an ASGI application on a socket, in this loop; gives its address."""
    listener = listener or socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    if isinstance(app, Dispatcher):
        async with opened(port_of(app), listener, protocol=partial(Http1Protocol, is_of_peer=is_of_peer)):
            yield url
        return
    server = QuickServer(
        uvicorn.Config(
            app,
            interface="asgi3",
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,
        )
    )
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.001)
        yield url
    finally:
        server.stop()
        await task


@dataclass
class FakeProxy:
    """A data plane over engines that are ready from the start; no monitor."""

    transport: HttpTransport
    reuse: bool = False
    tenants: Tenants = field(default_factory=lambda: Tenants(()))
    rules: Rules = field(default_factory=Rules)
    wait_s: float = 0.1
    max_body_bytes: int = 1 << 20
    bodies_bytes: int = 1 << 30
    translations: Mapping[str, Translate] | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    default_model: str | None = None
    cors_origins: tuple[str, ...] = ()
    queue: LimitSettings | None = None
    normalising: Normalising = NO_RULES
    exchange: Callable[[int], PeerExchange] | None = None  # owner → what it tells other proxies through
    url: str = ""

    def __post_init__(self):
        self.fleet = Fleet(self.aliases, self.default_model, self.queue)
        self.tasks = Supervisor()
        self.peers = None
        if self.exchange is not None:
            owner = secrets.randbits(63)
            exchange = self.exchange(owner)
            self.peers = Peers(exchange, owner, self.fleet, self.tenants, self.transport.hang_up)
            self.peers.start(self.tasks)
        self.bodies = ByteBudget(self.bodies_bytes)
        self.metrics = Metrics(self.fleet, peers=self.peers, bodies=self.bodies)
        self.requests = RequestRecords(100)
        self.responses = ResponseStore(self.tenants.names)
        self.ingest = Ingest(self.fleet, self.tasks) if self.reuse else None
        destinations = Destinations(self.fleet, self.tenants.names)
        translated = translations(self.responses) if self.translations is None else self.translations
        self.flow = Flow(
            fleet=self.fleet,
            preparation=Preparation(
                destinations,
                self.tenants,
                MediaUuids(),
                translated,
                reuse=self.reuse,
                normalising=self.normalising,
            ),
            attempts=Attempts(self.transport, self.ingest, self.tenants),
            tenants=self.tenants,
            requests=self.requests,
            rules=self.rules,
            wait_s=self.wait_s,
            observe=self.metrics.observe,
        )
        cors = Cors(self.cors_origins) if self.cors_origins else None
        kept = KeptResponses(self.responses)
        elsewhere = PassedToOwner(self.fleet, self.peers, self.transport) if self.peers is not None else None
        to_keeper = PassedToKeeper(self.peers.sockets, self.transport) if self.peers is not None else None
        data_plane = DataPlane(
            self.flow,
            self.tenants,
            Gate(self.tenants, self.bodies),
            self.max_body_bytes,
            JsonSize(),
            kept,
            cors,
            self.metrics.refuse,
            elsewhere,
            to_keeper,
        )
        ops = Ops(self.fleet, self.metrics, peers=self.peers)
        self.site = Dispatcher(
            data_plane, Starlette(routes=ops.routes(), exception_handlers=dict.fromkeys(ANSWERED, handle))
        )

    def add(self, fake: FakeEngine | FakeAdapter, **info) -> Engine:
        adapter = fake if isinstance(fake, FakeAdapter) else FakeAdapter(fake.id, fake.url)
        adapter.info = replace(adapter.info, **info)
        engine = self.fleet.add(adapter)
        pool = self.fleet.join(engine, adapter.info)
        if self.reuse:
            pool.render(engine, pool.prompts or prompts_of(adapter.info), is_proven=True)
        engine.state = EngineState.READY
        return engine

    @property
    def last(self):
        return list(self.requests)[-1]

    async def settled(self) -> None:
        """Returns when no request is in flight and nothing is pending; fails when that does not come."""
        async with asyncio.timeout(60):
            while any(e.ledger.in_flight for e in self.fleet.engines.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            while any(p.index.counts(e)[3] for p in self.fleet.pools.values() for e in p.engines):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self.tasks.stop()
        for engine in self.fleet.engines.values():
            await engine.adapter.aclose()


def client_of(proxy: FakeProxy, **options) -> httpx.AsyncClient:
    """A client whose only address is the proxy; loading certificates would cost more than the tests."""
    return httpx.AsyncClient(base_url=proxy.url, timeout=10, verify=False, **options)  # noqa: S501


async def connect_to(proxy: FakeProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", httpx.URL(proxy.url).port)


def post(path: str, body: bytes = b"{}", *headers: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        f"content-length: {len(body)}",
        "connection: close",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def is_openai_error(response: httpx.Response, status: int, code=..., param=...) -> bool:
    """Whether an answer is that error, in OpenAI's shape."""
    error = response.json()["error"]
    assert response.status_code == status, response.text
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["type"], str)
    return (code is ... or error["code"] == code) and (param is ... or error["param"] == param)


@contextlib.asynccontextmanager
async def proxy_over(*engines: FakeEngine | FakeAdapter, **options) -> AsyncIterator[FakeProxy]:
    """A proxy on a socket in front of these engines."""
    transport = HttpTransport(connect_timeout_s=2)
    proxy = FakeProxy(transport, **options)
    for engine in engines:
        proxy.add(engine)
    async with serving(proxy.site) as url:
        proxy.url = url
        try:
            yield proxy
        finally:
            await proxy.close()
    await transport.aclose()


@contextlib.asynccontextmanager
async def asked(
    *scripts: Script, headers: Mapping[str, str] | None = None, **options
) -> AsyncIterator[tuple]:
    """A proxy, a client of it, and its engines "a", "b" and so on, which answer by these scripts."""
    async with contextlib.AsyncExitStack() as stack:
        named = zip("abcdef", scripts, strict=False)
        engines = [await stack.enter_async_context(FakeEngine(*each)) for each in named]
        proxy = await stack.enter_async_context(proxy_over(*engines, **options))
        yield proxy, await stack.enter_async_context(client_of(proxy, headers=headers)), *engines
