"""What all adapters use: what an engine says of its models and its health, and what its events have told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from engine_adapter.errors import EngineRejected, EngineUnavailable, EngineUnhealthy
from engine_adapter.http.control import WANTS_KEY, ControlClient
from engine_adapter.types import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EngineSpec,
    Finding,
    KvEvent,
    Tier,
    ViewCurrent,
    ViewLost,
    ViewResumed,
)

# --- reads what an engine says of its models at `/v1/models` --------------------------------------------

# Fields of a model's card that kvpin sets itself, or that differ each time. A `root` may be a path.
_NOT_THE_ENGINES = frozenset({"id", "object", "created", "owned_by", "root", "parent", "permission"})


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The base model of an engine.

    Attributes:
        max_model_len: its context in tokens, None if the engine does not say.
        root: directory or hub id, None if the engine does not say.
        card: the engine's own fields of it, without those that kvpin sets itself.
        loras: names of the LoRA adapters beside it.
        lora_paths: where the engine read each of them from, as far as it says.
        others: names of the other base models: more names of this one, or LoRA adapters of an engine that
            names no parents.
    """

    name: str
    max_model_len: int | None
    root: str | None
    card: Mapping[str, Any] = field(repr=False)
    loras: frozenset[str]
    lora_paths: Mapping[str, str]
    others: frozenset[str] = frozenset()


def read_models(answer: object, wanted: str | None = None) -> ServedModel:
    """The base model named `wanted`, or the first base model if there is none of that name. Raises
    EngineUnavailable: the answer names no base model."""
    match answer:
        case {"data": [*entries]}:
            named = [each for each in entries if isinstance(each, dict) and isinstance(each.get("id"), str)]
        case _:
            named = []
    bases = [each for each in named if each.get("parent") is None]
    if not bases:
        raise EngineUnavailable("/v1/models names no model")
    adapters = [each for each in named if each.get("parent") is not None]
    base = next((each for each in bases if each["id"] == wanted), bases[0])
    length, root = base.get("max_model_len"), base.get("root")
    return ServedModel(
        name=base["id"],
        max_model_len=length if isinstance(length, int) else None,
        root=root if isinstance(root, str) else None,
        card={name: value for name, value in base.items() if name not in _NOT_THE_ENGINES},
        loras=frozenset(each["id"] for each in adapters),
        lora_paths={each["id"]: each["root"] for each in adapters if isinstance(each.get("root"), str)},
        others=frozenset(each["id"] for each in bases) - {base["id"]},
    )


KIND_OF_OWNER = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt_llm": "tensorrt_llm",
    "llamacpp": "llama_server",
    "lmdeploy": "lmdeploy",
}
"""`owned_by` of an engine's first model → its kind."""


def owner_of(models: object) -> str:
    """`owned_by` of the first model in an answer of `/v1/models`; "" where it has none."""
    match models:
        case {"data": [{"owned_by": str(owner)}, *_]}:
            return owner
        case _:
            return ""


def wrong_kind(models: object, spec: EngineSpec[Any]) -> Finding | None:
    """A finding if an answer of `/v1/models` comes from another kind of engine than `spec` says: kvpin's own
    engine and a kvpin in front of engines among them."""
    kind = {**KIND_OF_OWNER, "kvpin": "embedded"}.get(owner_of(models))
    if kind is None or kind == spec.kind:
        return None
    return Finding(
        f"it is no {spec.kind}: its models say that it is of the kind {kind}; kvpin does not know its cache",
        f"name its kind: --engine {kind}={spec.url}; if that is a kvpin, name the engines behind it",
    )


# --- its requests, events and health --------------------------------------------------------------------


def rank_headers(rank: int | None) -> dict[str, str]:
    """The headers that send a request to a data-parallel rank; none where the server is left to choose."""
    return {} if rank is None else {"x-data-parallel-rank": str(rank)}


class EventWatch:
    """The blocks known to lie on the GPU, and how often the cache was cleared.

    Engines such as vLLM report a block when it is stored, and again on reuse if the request asks for that.
    While the view is incomplete, kvpin's requests ask, so reused blocks become known. That ends when the
    cache was cleared, or when as many blocks are known as the cache holds.

    Attributes:
        capacity: of the GPU, in the engine's blocks; None where unknown.
        clearings: how often the cache was cleared.
        is_followed: somebody reads the events now.
        tokens_per_block: the block size; None until blocks show it.
    """

    def __init__(self) -> None:
        self.capacity: int | None = None
        self._known: set[int | bytes] = set()
        self._learned: int | None = None  # newly known blocks while the view is incomplete, else None
        self.clearings = 0
        self.is_followed = False
        self.tokens_per_block: int | None = None
        self._cleared = asyncio.Event()

    @property
    def blocks(self) -> int:
        """Blocks known to lie on the GPU."""
        return len(self._known)

    @property
    def wants_reuse_told(self) -> bool:
        """True if requests should ask the engine to report reused blocks."""
        return self._learned is not None

    def note(self, event: KvEvent) -> None:
        """Notes an event that its reader has processed."""
        match event:
            case BlocksStored(tier=Tier.GPU, hashes=hashes, group=None):
                self.tokens_per_block = event.tokens_per_block
                self._store(hashes)
            case BlocksRemoved(tier=Tier.GPU, hashes=hashes, group=None):
                self._known.difference_update(hashes)
            case ViewCurrent(complete=complete):
                self._learned = None if complete else 0
            case ViewLost() | ViewResumed():
                self._forget()
            case CacheCleared():
                self._forget()
                self.clearings += 1
                self._cleared.set()

    def _store(self, hashes: tuple[int | bytes, ...]) -> None:
        before = len(self._known)
        self._known.update(hashes)
        if self._learned is not None:
            self._learned += len(self._known) - before
            if self.capacity is not None and self._learned >= self.capacity:
                self._learned = None

    def _forget(self) -> None:
        self._known.clear()
        self._learned = None

    async def wait_for_clearing(self, after: int, timeout_s: float) -> bool:
        """Waits until the cache was cleared more than `after` times; False after the time-out."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.clearings <= after:
                    self._cleared.clear()
                    await self._cleared.wait()
        return self.clearings > after


class HealthRoute:
    """A route that answers 2xx while the engine is well. A server without it is not asked again."""

    def __init__(self, control: ControlClient, path: str, *lacks: int) -> None:
        """`lacks`: further statuses, beside 404, by which servers answer that lack the route."""
        self._control, self._path = control, path
        self._lacks = (HTTPStatus.NOT_FOUND, *lacks)
        self._is_there = True

    async def check(self) -> None:
        """Raises EngineUnhealthy if the engine is not well, EngineUnavailable if it is not reachable, and
        EngineRejected if it wants a key."""
        if not self._is_there:
            return
        try:
            await self._control.fetch("GET", self._path)
        except EngineRejected as error:
            if error.status not in self._lacks:
                if error.status in WANTS_KEY:
                    raise
                raise EngineUnhealthy(f"{self._path} answered {error.status}: {error}") from error
            self._is_there = False
