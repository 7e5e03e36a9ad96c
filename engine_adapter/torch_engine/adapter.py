"""Drives an embedded engine over its HTTP routes and its event sockets. Needs no torch."""

from __future__ import annotations

import re
from array import array
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any
from urllib.parse import quote

import msgspec
from typing_extensions import override

from engine_adapter.base import EngineAdapter
from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineDied, EngineGarbled, EngineRejected, EngineUnavailable
from engine_adapter.events.fields import MalformedEvents
from engine_adapter.events.options import reachable_endpoint
from engine_adapter.events.subscriber import EventEndpoints, KvEventSubscriber
from engine_adapter.events.wire import CacheSnapshot, decode_snapshot
from engine_adapter.hold import AnswerReader, Hold, RequestBody, Resumption
from engine_adapter.options import ASK
from engine_adapter.torch_engine.event_publisher import EventSource
from engine_adapter.torch_engine.kv_cache import SliceResult
from engine_adapter.types import (
    NOT_RETAINED,
    TRANSLATED_ROUTES,
    Capability,
    EngineInfo,
    EngineLoad,
    EventPosition,
    KvEvent,
    KvProgress,
    KvTarget,
    KvVerb,
    Pinned,
    PromptTable,
    TokenIds,
)

ROUTES = {"/tokenize": ASK, "/detokenize": ASK}
"""Its routes beside `/v1`. Those below `/kv` are for kvpin alone."""

# In the error event of an engine that ends; a tool may have that name, too.
_ENDS = b'"engine_unavailable"'
_ENDED = re.compile(rb'^data: \{"error":.*"code":"engine_unavailable"', re.MULTILINE)
# Text cannot contain it: JSON strings have no line feed.
_TOLD = re.compile(rb"^: ([\d ]+)\n", re.MULTILINE)
_ODD = re.compile(rb"^:", re.MULTILINE)


class ToldTokens(AnswerReader):
    """Reads the token ids that the engine tells in comments of a stream, and removes the comments.

        : 1032 77
        data: {"id": "chatcmpl-…", "choices": […]}

    The tokens are those of all text up to the end of the event. With them, another engine goes on where this
    one ends. Raises EngineUnavailable where it can: the engine says that it ends, or tells what are no ids.
    """

    def __init__(self, answered: object = None) -> None:
        """`answered`: the tokens with which the request begins its answer, if it does."""
        self._answered = answered if isinstance(answered, list) else []
        self._told = bytearray()  # as text: five bytes per token

    @override
    def feed(self, chunk: bytes) -> bytes:
        if _ENDS in chunk and _ENDED.search(chunk) is not None:
            raise EngineDied("the engine ended in mid-answer")
        if b"\n: " not in chunk and (first := _TOLD.match(chunk)) is not None:  # one event, as nearly always
            self._told += b" " + first[1]
            return chunk[first.end() :]
        parts = _TOLD.split(chunk)
        events = b"".join(parts[::2])
        if _ODD.search(events) is not None:
            raise EngineGarbled("the engine told tokens that are no ids")
        self._told += b"".join(b" " + told for told in parts[1::2])
        return events

    def resume(self) -> Resumption:
        """The tokens that another engine needs to go on with the answer."""
        token_ids = [*self._answered, *map(int, self._told.split())]
        return Resumption(array("i", token_ids), {"answer_token_ids": token_ids})


_PROMPT_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions"})
_CAPABILITIES = frozenset(Capability) - {Capability.RENDER}
_WITHOUT_HOST_TIER = _CAPABILITIES - {Capability.OFFLOAD, Capability.RESTORE}
_NO_HOST_TIER = "start it with --host-cache-bytes to give it a host tier"
_INSTEAD = {
    Capability.RENDER: "this engine takes text and embeddings only",
    Capability.OFFLOAD: _NO_HOST_TIER,
    Capability.RESTORE: _NO_HOST_TIER,
}
_KEEPING = ("keep_priority", "keep_s", "keep_for")
CACHED_TOKENS_HEADER = "x-kv-cached-tokens"
"""Response header: how many prompt tokens came from cache."""


class _Info(msgspec.Struct, frozen=True):
    version: str
    instance: str
    model: str
    tokenizer: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    tokens_per_block: int
    gpu_blocks: int
    host_blocks: int


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


class _Unpinned(msgspec.Struct, frozen=True):
    unpinned: bool


class _Load(msgspec.Struct, frozen=True):
    instance: str
    running: int
    waiting: int


class EmbeddedAdapter(EngineAdapter):
    """`EngineAdapter` of `kvpin engine`."""

    instead = _INSTEAD
    _instance: str | None = None

    @override
    async def connect(self) -> EngineInfo:
        info = await self._control.read(_Info, "GET", "/kv/info")
        self._instance = info.instance
        self.capabilities = _CAPABILITIES if info.host_blocks else _WITHOUT_HOST_TIER
        told = msgspec.structs.asdict(info)
        return EngineInfo(
            **told | {"tokenizer": self.spec.tokenizer or info.tokenizer},
            capabilities=self.capabilities,
            shares_prefill=True,
            routes=ROUTES,
            renders_alike=True,
            served_as_chats=TRANSLATED_ROUTES,
            runs_several=False,
            card={"max_model_len": info.max_model_len},
        )

    @override
    async def load(self) -> EngineLoad:
        load = await self._control.read(_Load, "GET", "/kv/load")
        if self._instance not in (None, load.instance):
            raise EngineUnavailable("the engine was restarted")
        return EngineLoad(running=load.running, waiting=load.waiting)

    @override
    def hold(
        self, path: str, body: RequestBody, prompt: KvTarget | None
    ) -> AbstractAsyncContextManager[Hold]:
        """The request tells the engine what to retain, and for whom. The engine tells the tokens of a stream,
        so that another one can go on with it."""
        if path not in _PROMPT_ROUTES or not isinstance(body, JsonBody):
            return nullcontext(Hold(body))
        retention = (prompt.retention if prompt is not None else None) or NOT_RETAINED
        changes: dict[str, Any] = {}
        owner, retains = retention.owner, retention.priority > 0
        if retains:
            asked = body.get("keep_priority")
            priority = max(asked, retention.priority) if isinstance(asked, int) else retention.priority
            changes = {"keep_priority": priority, "keep_s": retention.ttl_s}
        # After a tool call, the engine retains the prompt without being asked.
        is_kept_for = owner is not None and "tools" in body
        if changes or is_kept_for or any(name in body for name in _KEEPING):
            # The owner is never the client's choice: it could use up the share of another owner.
            changes["keep_for"] = owner
        # Logprobs of a prompt need all of it computed, whatever the engine holds.
        computes_all = path == "/v1/completions" and body.get("echo") and body.get("logprobs") is not None
        cached = 0 if computes_all else None
        if body.get("stream") is not True or body.get("echo"):  # an echo would be sent twice
            changed = body.replace(**changes) if changes else body
            return nullcontext(Hold(changed, cached_tokens=cached, retains=retains))
        told = ToldTokens(body.hint("answer_token_ids"))
        changes["stream_token_ids"] = True
        return nullcontext(Hold(body.replace(**changes), answer=told, retains=retains, resume=told.resume))

    @override
    def cached_tokens(self, headers: Mapping[str, str]) -> int | None:
        text = headers.get(CACHED_TOKENS_HEADER, "")
        return int(text) if text.isascii() and text.isdigit() else None

    @override
    async def tokenize(self, path: str, body: JsonBody) -> TokenIds[int]:
        if path not in _PROMPT_ROUTES:
            raise EngineRejected(f"{path} is not served here", status=404)
        return array("i", (await self._control.read(_Tokens, "POST", "/tokenize", content=body.raw)).tokens)

    @override
    async def events(self, since: EventPosition | None = None) -> AsyncGenerator[KvEvent, None]:
        sources = await self._control.read(dict[str, EventSource], "GET", "/kv_event_sources")
        if (source := next(iter(sources.values()), None)) is None:
            raise EngineUnavailable("the engine names no event source")
        endpoints = EventEndpoints(
            self._reachable(source.endpoint), self._reachable(source.replay_endpoint), source.topic
        )
        subscriber = KvEventSubscriber(endpoints, snapshot=self._snapshot)
        async with aclosing(subscriber.events()) as events:
            async for event in events:
                yield event

    @override
    async def operate(self, verb: KvVerb, target: KvTarget) -> AsyncGenerator[KvProgress, None]:
        await self.require(Capability(verb.value))
        body = _target_fields(target)
        done = moved_bytes = 0
        while True:
            part = await self._control.read(SliceResult, "POST", f"/kv/{verb.value}", json=body)
            done += part.moved
            moved_bytes += part.bytes
            yield KvProgress(done, done + part.remaining, moved_bytes, part.left)
            if not part.remaining or not part.moved:
                return

    @override
    async def pin(self, target: KvTarget, ttl_s: float) -> Pinned:
        body = _target_fields(target) | {"ttl_s": ttl_s}
        return await self._control.read(Pinned, "POST", "/kv/pin", json=body)

    @override
    async def unpin(self, pin_id: str) -> bool:
        return (await self._control.read(_Unpinned, "POST", "/kv/unpin", json={"pin_id": pin_id})).unpinned

    @override
    async def put_prompt_table(self, table: PromptTable) -> None:
        """Raises EngineRejected (409) when the id is taken."""
        path = f"{_table_path(table.table_id)}?extra_id={table.extra_id}"
        await self._control.fetch("PUT", path, table.data)

    @override
    async def delete_prompt_table(self, table_id: str) -> None:
        await self._control.fetch("DELETE", _table_path(table_id))

    @override
    async def stats(self) -> dict[str, Any]:
        return await self._control.read(dict[str, Any], "GET", "/kv/stats")

    async def _snapshot(self) -> CacheSnapshot:
        try:
            return decode_snapshot(await self._control.fetch("GET", "/kv/snapshot"))
        except MalformedEvents as error:
            raise EngineUnavailable(f"the engine's snapshot cannot be read: {error}") from error

    def _reachable(self, endpoint: str) -> str:
        # The engine binds its event sockets to the host that serves HTTP, and HTTP was reached.
        return reachable_endpoint(endpoint, self.spec.url) or endpoint


def _target_fields(target: KvTarget) -> dict[str, Any]:
    token_ids, extra_ids = target.token_ids, target.extra_ids
    return {
        "token_ids": None if token_ids is None else token_ids.tolist(),
        "extra_ids": None if extra_ids is None else extra_ids.tolist(),
        "cache_salt": target.cache_salt,
    }


def _table_path(table_id: str) -> str:
    return f"/kv/prompt_tables/{quote(table_id, safe='')}"
