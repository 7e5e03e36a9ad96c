"""A control plane over engines whose caches are sets in memory: every block they hold can be looked at."""

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import httpx
import msgspec
from starlette.applications import Starlette

from engine_adapter import (
    Capability,
    EngineRejected,
    EngineUnavailable,
    HttpTransport,
    KvProgress,
    KvVerb,
    Pinned,
)
from proxy.api.admin import (
    admin_mount,
    engine_routes,
    event_routes,
    kv_routes,
    prefix_routes,
    replay_routes,
    request_routes,
    table_routes,
)
from proxy.api.auth import AdminGuard
from proxy.api.own_answers import handle_http
from proxy.control.keys import SharedTables
from proxy.control.kv import KvOrders
from proxy.control.prefixes import Prefixes
from proxy.control.replays import Replays
from proxy.control.target_engines import Targets
from proxy.fleet.engine import Engine, EngineState
from proxy.prompt import Prompt
from proxy.request.records import RequestRecord
from proxy.server.app import Proxy
from proxy.settings import load_settings
from tests.fakes import INFO, FakeAdapter, prompts_of

ALL = frozenset(Capability)


class KvFake(FakeAdapter):
    """An engine that holds prefixes as (namespace, token ids of whole blocks) on two tiers, 16 tokens a
    block. The namespace is the salt, with the LoRA adapter where there is one.

    `gate` holds operations up between their slices while it is unset; `failure` is raised by the next one.
    """

    def __init__(self, engine_id="a", capabilities=ALL, loras=(), **options):
        # No events unless a test feeds them, so that its view is learned.
        alike = Capability.EXTRA_IDS in capabilities
        info = replace(INFO, capabilities=capabilities, loras=frozenset(loras), renders_alike=alike)
        super().__init__(engine_id, info=info, **options)
        self.tiers: dict[tuple, str] = {}
        self.pins: dict[str, list] = {}
        self.prompt_tables: dict[str, bytes] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.in_use: set[tuple] = set()
        self.targets: list = []
        self.closed = False

    def keep(self, prompt: Prompt, tier="gpu"):
        for block in blocks_of(prompt.token_ids, namespace_of(prompt.salt, prompt.lora)):
            self.tiers[block] = tier

    def found(self, target):
        if target.token_ids is not None:
            namespace = namespace_of(target.cache_salt, target.lora)
            return [b for b in blocks_of(target.token_ids, namespace) if b in self.tiers]
        salts = {b: b[0][0] if isinstance(b[0], tuple) else b[0] for b in self.tiers}
        return [b for b, salt in salts.items() if target.cache_salt in (None, salt)]

    async def operate(self, verb, target):
        self.targets.append(target)
        moves = {KvVerb.FLUSH: (None, None), KvVerb.OFFLOAD: ("gpu", "host"), KvVerb.RESTORE: ("host", "gpu")}
        source, goal = moves[verb]
        todo = [b for b in self.found(target) if source in (None, self.tiers[b])]
        left = {"in_use": sum(b in self.in_use for b in todo)}
        todo = [b for b in todo if b not in self.in_use]
        for done, block in enumerate(todo):
            yield KvProgress(done, len(todo), done * 100, left)
            await self.gate.wait()
            if self.failure is not None:
                raise self.failure
            if goal is None:
                del self.tiers[block]
            else:
                self.tiers[block] = goal
        yield KvProgress(len(todo), len(todo), len(todo) * 100, left)

    async def pin(self, target, ttl_s):
        if self.failure is not None:
            raise self.failure
        blocks = self.found(target)
        pin_id = f"{self.spec.id}-{len(self.pins)}"
        self.pins[pin_id] = blocks
        return Pinned(pin_id, len(blocks), ttl_s)

    async def unpin(self, pin_id):
        if self.failure is not None:
            raise self.failure
        return self.pins.pop(pin_id, None) is not None

    async def put_prompt_table(self, table):
        if self.failure is not None:
            raise self.failure
        self.prompt_tables[table.table_id] = table.data

    async def delete_prompt_table(self, table_id):
        if isinstance(self.failure, EngineUnavailable):
            raise self.failure
        self.prompt_tables.pop(table_id, None)

    async def stats(self):
        if self.failure is not None:
            raise self.failure
        return {"gpu": {"cached": len(self.tiers)}}

    async def aclose(self):
        self.closed = True
        await super().aclose()


def namespace_of(salt, adapter):
    return salt if adapter is None else (salt, adapter)


def blocks_of(token_ids, namespace=None):
    ends = range(16, len(token_ids) + 1, 16)
    return [(namespace, tuple(token_ids[:end])) for end in ends]


def tokens(n, start=0):
    """`n` token ids below the test vocabulary of 600."""
    return [(start + 7 * i) % 500 + 3 for i in range(n)]


@dataclass
class KvWorld:
    """A proxy's parts, a control plane over them, and a client of its admin API."""

    proxy: Proxy
    tokenizer: str
    now: float = 100.0
    engines: dict[str, Engine] = field(default_factory=dict)

    def __post_init__(self):
        proxy = self.proxy
        self.fleet, self.flow, self.tenants, self.pins = proxy.fleet, proxy.flow, proxy.tenants, proxy.pins
        self.reuse = proxy.ingest is not None
        self.operations = proxy.operations
        self.targets = Targets(self.fleet, self.tenants, self.flow.requests, has_views=self.reuse)
        self.told = []  # what other workers tell of their prompts
        self.prefixes = Prefixes(self.fleet, self.flow.requests, self.pins, self._tell, lambda: self.now)
        self.kv = KvOrders(self.fleet, self.flow, self.targets, self.operations, lambda: self.now)
        self.tables = SharedTables(self.fleet, proxy.tables)
        self.endpoints = (
            *engine_routes(self.fleet, proxy.engines, self.kv, reuse=self.reuse),
            *kv_routes(self.kv, self.operations),
            *request_routes(self.flow),
            *prefix_routes(self.prefixes),
            *event_routes(proxy.live),
            *replay_routes(Replays()),
            *table_routes(self.tables),
        )

    async def _tell(self) -> list[bytes]:
        return self.told

    def add(self, fake: KvFake) -> Engine:
        """A connected, ready engine; its pool tokenises with the test tokenizer."""
        engine = self.fleet.add(fake)
        pool = self.fleet.join(engine, fake.info)
        info = replace(fake.info, tokenizer=self.tokenizer, vocab_size=600, hidden_size=4)
        builder = pool.prompts or prompts_of(info, tables=self.proxy.tables)
        pool.render(engine, builder, is_proven=True)
        engine.state = EngineState.READY
        self.engines[engine.id] = engine
        return engine

    @property
    def pool(self):
        return self.fleet.pool(None)

    def served(self, fake: KvFake, ids, salt=None, lora=None) -> Prompt:
        """The engine has served a prompt: it holds its blocks, and the proxy knows."""
        prompt = Prompt(array("i", ids), None, salt, lora)
        fake.keep(prompt)
        self.pool.learn(self.engines[fake.spec.id], self.pool.chain(prompt).hashes)
        return prompt

    def matched(self, ids, salt=None, lora=None):
        """Engine → blocks of the prompt that the index believes it holds."""
        prompt = Prompt(array("i", ids), None, salt, lora)
        matches = self.pool.index.match(self.pool.chain(prompt).hashes)
        return {engine: match.blocks for engine, match in matches.items()}

    def record(self, request_id, ids, **fields) -> RequestRecord:
        """A finished request in the log."""
        salt, lora = fields.pop("salt", None), fields.pop("lora", None)
        prompt = Prompt(array("i", ids), None, salt, lora) if ids is not None else None
        given = {"started": len(list(self.flow.requests)) + 1.0, "route": "/v1/completions", "model": "m"}
        given |= {"tenant": None, "stream": False, "prompt": prompt, "status": 200, "lora": lora}
        given["served_as"] = "m" if lora is not None else fields.get("model", "m")
        record = RequestRecord(request_id, **(given | fields))
        self.flow.requests.add(record)
        return record

    def client(self, guard: AdminGuard | None = None, peer="127.0.0.1") -> httpx.AsyncClient:
        app = Starlette(
            routes=[admin_mount(self.endpoints, guard or AdminGuard(None))],
            exception_handlers={404: handle_http, 405: handle_http},
        )
        transport = httpx.ASGITransport(app, client=(peer, 1234))
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/admin/v1")


@contextlib.asynccontextmanager
async def kv_world(tokenizer, **settings) -> AsyncIterator[KvWorld]:
    """A world without engines; `settings` as `load_settings` takes them."""
    transport = HttpTransport(connect_timeout_s=2)
    proxy = Proxy(load_settings(**({"reuse": True} | settings)), transport)
    try:
        yield KvWorld(proxy, str(tokenizer))
    finally:
        await proxy.stop()


async def until(condition, seconds=30.0):
    """Waits for a condition of the world; fails when it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        await asyncio.sleep(0.005)


async def finished(operation):
    """The operation, once it has ended."""
    assert await operation.wait(5)
    return operation


def rejected(status=400, message="no"):
    return EngineRejected(message, status=status, param=None)


def safetensors_of(rows=2, hidden=4, value=0.5):
    """A p-tuning table as bytes: eight of length, a JSON header, the values."""
    data = array("f", [value] * (rows * hidden)).tobytes()
    entry = {"dtype": "F32", "shape": [rows, hidden], "data_offsets": [0, len(data)]}
    header = msgspec.json.encode({"t": entry})
    return len(header).to_bytes(8, "little") + header + data
