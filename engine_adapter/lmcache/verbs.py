"""Offload, restore and flush in LMCache, in slices.

vLLM writes computed KV to the node's L1, and the node writes it to L2 at once. So offload waits until
everything is on L2 and drops it from L1, restore prefetches it, and flush drops it from both. vLLM's own
cache is not affected.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import uuid
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineError, EngineUnavailable
from engine_adapter.lmcache.client import (
    Coordinator,
    Key,
    KvChunk,
    LmCacheNode,
    LmCacheSite,
    Scope,
    chunks_of,
    leading,
)
from engine_adapter.types import KvProgress

# --- cache salts for KV that LMCache would mix up -------------------------------------------------------
# LMCache identifies KV by model, token ids and cache salt. It ignores LoRA adapters and prompt embeddings,
# whose token ids are all equal. A request could be answered from the KV of another LoRA adapter or of other
# embeddings (observed with LMCache 0.5.6). So kvpin gives such requests their own salt, which vLLM and
# LMCache both respect. LMCache refuses some salts and would stall the request, so kvpin sends a digest of
# those.

_FORBIDDEN = frozenset("@/\\\x00~")  # LMCache refuses all but the last; the last marks salts made here
_MAX_SALT = 128  # LMCache's
_DIGEST = 16  # bytes; twice as many hex characters follow the mark
_MAX_OWN = _MAX_SALT - 2 * _DIGEST - 1
_EMBEDDINGS = "prompt_embeds"
_NAMED = b'"prompt_embeds"'
_ESCAPED = re.compile(rb"\\u00[567]")  # a letter of that name, as JSON may write it


def salt_for(salt: str | None, lora: str | None = None, embeddings: str | None = None) -> str | None:
    """The salt to send with a request, from its own salt and the identities of its LoRA adapter and prompt
    embeddings."""
    if salt is not None and (len(salt) > _MAX_OWN or not _FORBIDDEN.isdisjoint(salt)):
        salt = _mark("salt", salt)
    if lora is None and embeddings is None:
        return salt
    return (salt or "") + _mark("kv", lora, embeddings)


def without_lora(sent: str | None, lora: str | None) -> str | None:
    """A request's own salt, from the salt that was sent with it and its LoRA adapter."""
    if sent is None or lora is None:
        return sent
    return sent.removesuffix(_mark("kv", lora, None)) or None


def is_under(sent: str, salt: str) -> bool:
    """True if a sent salt belongs to a request with this own salt, with any LoRA adapter."""
    own = salt_for(salt) or ""
    return sent == own or sent.startswith(f"{own}~")


def embeddings_of(body: JsonBody) -> str | None:
    """Identity of a request's prompt embeddings; None if it has none."""
    if _NAMED not in body.raw and not _ESCAPED.search(body.raw):
        return None
    value, rest = body.get(_EMBEDDINGS), body.replace(**{_EMBEDDINGS: None})
    # Elsewhere they may be anywhere in the request, so only an identical request counts as equal.
    if _NAMED in msgspec.json.encode(rest.decoded()):
        return hashlib.sha256(body.raw).hexdigest()
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest() if value is not None else None


def _mark(kind: str, *values: str | None) -> str:
    """A mark for values of one kind, different from the marks of other values."""
    data = msgspec.json.encode(values)
    return "~" + hashlib.blake2b(data, digest_size=_DIGEST, person=kind.encode()).hexdigest()


# --- verbs ----------------------------------------------------------------------------------------------

SLICE = 64
"""Chunks in one step of an operation."""
_POLL_S = 0.05
_PATIENCE_S = 30.0
_PASSES = 4


class KvMover:
    """Moves KV between the tiers of a node. Progress counts the engine's blocks. `blocks_per_chunk`: those of
    the engine in a chunk."""

    def __init__(self, node: LmCacheNode, site: LmCacheSite, blocks_per_chunk: int) -> None:
        self._node = node
        self.site = site
        self.blocks_per_chunk = blocks_per_chunk

    async def offload(
        self, token_ids: array[int] | None, salt: str | None
    ) -> AsyncGenerator[KvProgress, None]:
        """L1 → L2: a prompt, a salt, or everything. Chunks that a request uses stay."""
        chunks = [chunk for chunk in await self.written(token_ids, salt) if chunk.on_host]
        safe = [chunk for chunk in chunks if chunk.on_disk]
        waiting = (len(chunks) - len(safe)) * self.blocks_per_chunk
        left = {"not_on_disk": waiting} if waiting else {}
        async with aclosing(self._drop(safe, "l1", KvProgress(0, waiting, left=left))) as steps:
            async for progress in steps:
                yield progress

    async def restore(self, token_ids: array[int], salt: str | None) -> AsyncGenerator[KvProgress, None]:
        """L2 → L1: the prompt's leading chunks, up to the first missing one."""
        held = leading(await self.look(token_ids, salt))
        total = sum(not chunk.on_host for chunk in held)
        done = moved = 0
        yield KvProgress(0, total * self.blocks_per_chunk)
        for start in range(0, len(held) if total else 0, SLICE):
            below = [chunk for chunk in held[start : start + SLICE] if not chunk.on_host]
            if below:
                end = min(start + SLICE, len(held))
                lost = await self._prefetch(token_ids[: end * self.site.tokens_per_chunk], salt)
                found = max(len(below) - lost, 0)
                done += found
                moved += sum(chunk.bytes for chunk in below[:found])
                left = {"not_restored": (total - done) * self.blocks_per_chunk} if lost else {}
                yield KvProgress(done * self.blocks_per_chunk, total * self.blocks_per_chunk, moved, left)
                if lost:
                    return

    async def flush(self) -> AsyncGenerator[KvProgress, None]:
        """Drops all KV of the model from both tiers, until the coordinator lists none."""
        before = last = KvProgress(0, 0)
        dropped: set[tuple[Key, ...]] = set()
        for _ in range(_PASSES):
            await self.settle()
            held = [chunk for chunk in await self._held(None, None) if chunk.held]
            # The coordinator hears late, or never, that an object was already missing on disk.
            chunks = [chunk for chunk in held if chunk.on_host or chunk.keys not in dropped]
            if not chunks:
                return
            dropped |= {chunk.keys for chunk in chunks}
            async with aclosing(self._drop(chunks, "all", before)) as steps:
                async for progress in steps:
                    yield progress
                    last = progress
            before = KvProgress(last.done, last.done, last.bytes)
            await asyncio.sleep(self.site.flush_s)  # until the coordinator has heard of it

    async def look(self, token_ids: array[int], salt: str | None) -> list[KvChunk]:
        """The chunks of a prompt, in its order."""
        found = await self.site.coordinator.lookup(self.site.scope, token_ids, salt or "")
        return chunks_of(found.results, self.site.scope.instance_id)

    async def written(self, token_ids: array[int] | None, salt: str | None) -> list[KvChunk]:
        """The chunks of a prompt, of a salt, or all, once they are on disk. If vLLM has just computed the
        prompt, waits briefly until the coordinator hears of it."""
        await self.settle()
        begun = _now()
        while True:
            chunks = await self._held(token_ids, salt)
            on_its_way = any(chunk.on_host and not chunk.on_disk for chunk in chunks)
            patience_s = _PATIENCE_S if on_its_way else 2 * self.site.flush_s
            if all(chunk.on_disk for chunk in chunks) or _now() > begun + patience_s:
                return chunks
            await asyncio.sleep(self.site.flush_s / 4)

    async def settle(self) -> None:
        """Waits until the node has written everything and the coordinator has heard of it."""
        instance, step_s = self.site.scope.instance_id, self.site.flush_s / 4
        deadline = _now() + _PATIENCE_S
        while True:
            storage = (await self._node.status()).storage_manager
            if not storage.is_storing or _now() > deadline:
                break
            await asyncio.sleep(step_s)
        deadline = _now() + 2 * self.site.flush_s
        while _now() < deadline:
            known = (await self.site.coordinator.stats()).l1_keys_by_instance.get(instance, 0)
            if known == storage.l1_objects:
                return
            await asyncio.sleep(step_s)

    async def _held(self, token_ids: array[int] | None, salt: str | None) -> list[KvChunk]:
        """The chunks of a prompt, of a salt, or all of the model."""
        if token_ids is not None:
            return await self.look(token_ids, salt)
        model = self.site.scope.model_name
        objects = [
            each
            for each in await self.site.coordinator.keys()
            if each.key.model_name == model and (salt is None or is_under(each.key.cache_salt, salt))
        ]
        return chunks_of(objects, self.site.scope.instance_id)

    async def _drop(
        self, chunks: Sequence[KvChunk], tier: str, before: KvProgress
    ) -> AsyncGenerator[KvProgress, None]:
        """Drops chunks from a tier; progress continues from `before`."""
        total = before.total + len(chunks) * self.blocks_per_chunk
        done, moved, left = before.done, before.bytes, dict(before.left)
        yield KvProgress(done, total, moved, dict(left))
        for start in range(0, len(chunks), SLICE):
            part = chunks[start : start + SLICE]
            keys = [key for chunk in part for key in chunk.keys]
            skipped = (await self._node.delete(keys, tier)).skipped
            stayed = -(-skipped * len(part) // len(keys))
            done += (len(part) - stayed) * self.blocks_per_chunk
            moved += sum(chunk.bytes for chunk in part) * (len(part) - stayed) // len(part)
            if stayed:
                left["in_use"] = left.get("in_use", 0) + stayed * self.blocks_per_chunk
            yield KvProgress(done, total, moved, dict(left))

    async def _prefetch(self, token_ids: array[int], salt: str | None) -> int:
        """Loads a prompt's chunks to L1; returns the number of objects that did not arrive."""
        job = await self._node.prefetch(self.site.scope, token_ids, salt or "")
        deadline = _now() + _PATIENCE_S
        while job.status != "completed":
            if _now() > deadline:
                raise EngineUnavailable(f"LMCache did not finish a prefetch within {_PATIENCE_S:.0f} s")
            await asyncio.sleep(_POLL_S)
            job = await self._node.prefetched(job.request_id)
        return job.total_keys - job.found_keys


def _now() -> float:
    return asyncio.get_running_loop().time()


_RETRY_S = 5.0
_FAREWELL_S = 2.0
_Result = TypeVar("_Result")


class _Pin(NamedTuple):
    unpin: Callable[[], Awaitable[int]]
    end: asyncio.Task[None]
    lock: asyncio.Lock  # of who ends it


class TimedPins:
    """kvpin's pins at a coordinator."""

    def __init__(self) -> None:
        self._pins: dict[str, _Pin] = {}
        self._changes: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, pin_id: str) -> bool:
        return pin_id in self._pins

    async def add(
        self, coordinator: Coordinator, scope: Scope, token_ids: array[int], salt: str, ttl_s: float
    ) -> str:
        """Pins the whole chunks of a prompt on L2 for `ttl_s` seconds; returns the pin's id."""

        async def pin() -> str:
            await coordinator.pin(scope, token_ids, salt)
            pin_id = uuid.uuid4().hex
            end = asyncio.get_running_loop().create_task(self._end(pin_id, ttl_s))
            unpin = partial(coordinator.unpin, scope, token_ids, salt)
            self._pins[pin_id] = _Pin(unpin, end, asyncio.Lock())
            return pin_id

        return await self._change(pin())

    async def remove(self, pin_id: str) -> bool:
        """Ends a pin; False if there is none with that id."""
        pin = self._pins.get(pin_id)
        if pin is not None:
            await self._change(self._remove(pin_id, pin))
        return pin is not None

    async def aclose(self) -> None:
        """Ends all pins, if the coordinator is reachable."""
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                while self._changes:
                    await asyncio.wait(self._changes)
                for pin_id in list(self._pins):
                    await self.remove(pin_id)
        left = [*self._changes, *(pin.end for pin in self._pins.values())]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        self._pins.clear()

    async def _change(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Does this to its end, also if its caller leaves: the coordinator counts the pins of a chunk, so
        none may be forgotten or ended twice."""
        task = asyncio.get_running_loop().create_task(work)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # its caller may have left
        await asyncio.wait((task,))
        if task.cancelled():
            raise EngineUnavailable("the engine was removed")
        return task.result()

    async def _remove(self, pin_id: str, pin: _Pin) -> None:
        async with pin.lock:
            if pin_id in self._pins:  # else it ended meanwhile
                await pin.unpin()
                del self._pins[pin_id]
                pin.end.cancel()

    async def _end(self, pin_id: str, ttl_s: float) -> None:
        """Ends a pin when its time is up, and retries until it succeeds."""
        await asyncio.sleep(ttl_s)
        while True:
            with suppress(EngineError):
                await self.remove(pin_id)
                return
            await asyncio.sleep(_RETRY_S)
