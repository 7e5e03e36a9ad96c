"""The routes of an LMCache node and of its coordinator.

Every call raises EngineUnavailable if there is no answer or one of another form, and EngineRejected for an
error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine_adapter.errors import EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.lmcache import wire
from engine_adapter.lmcache.options import LmCacheSpec

_PAGE = 5000


@dataclass(frozen=True, slots=True)
class Scope:
    """Selects one engine's KV: its model as LMCache names it, its ranks, and the node beside it."""

    model_name: str
    world_size: int
    instance_id: str


class Node:
    """The LMCache server beside an engine."""

    def __init__(self, spec: LmCacheSpec, url: str) -> None:
        """Raises EngineSpecError for an invalid address."""
        self._control = ControlClient(replace(spec, url=url, api_key=None, headers={}))

    async def status(self) -> wire.Status:
        """The server's status: its content, and the connected engines."""
        return await self._control.read(wire.Status, "GET", "/status")

    async def config(self) -> wire.Config:
        """Its configuration."""
        return await self._control.read(wire.Config, "GET", "/config")

    async def check(self) -> None:
        """Raises if it is not healthy."""
        await self._control.get("/healthcheck")

    async def prefetch(self, scope: Scope, token_ids: Sequence[int], salt: str) -> wire.Prefetch:
        """Starts to load a prompt's chunks from L2 to L1."""
        body = _prompt(scope, token_ids, salt)
        return await self._control.read(wire.Prefetch, "POST", "/cache/prefetches", json=body)

    async def prefetched(self, request_id: str) -> wire.Prefetch:
        """Progress of a prefetch. The node reports its end only once."""
        return await self._control.read(wire.Prefetch, "GET", f"/cache/prefetches/{request_id}")

    async def delete(self, keys: Sequence[wire.Key], tier: str) -> wire.Deleted:
        """Drops objects from `l1` or from `all` tiers, except those that a request uses."""
        body = {"keys": keys, "tier": tier, "force": False}
        deleted = await self._control.read(wire.Deleted, "DELETE", "/cache/objects", json=body)
        if not deleted.ok:
            raise EngineUnavailable(f"LMCache could not delete: {deleted.error}")
        return deleted

    async def aclose(self) -> None:
        """Closes its connections."""
        await self._control.aclose()


class Coordinator:
    """The LMCache coordinator, which knows what lies where."""

    def __init__(self, spec: LmCacheSpec, url: str) -> None:
        """Raises EngineSpecError for an invalid address."""
        self.url = url
        self._control = ControlClient(replace(spec, url=url, api_key=None, headers={}))

    async def check(self) -> None:
        """Raises if it is not healthy."""
        await self._control.get("/healthz")

    async def instances(self) -> frozenset[str]:
        """The nodes it knows."""
        answer = await self._control.read(wire.Instances, "GET", "/instances")
        return frozenset(each.instance_id for each in answer.instances)

    async def stats(self) -> wire.DirectoryStats:
        """The amount of KV on each tier."""
        return await self._control.read(wire.DirectoryStats, "GET", "/directory/stats")

    async def lookup(self, scope: Scope, token_ids: Sequence[int], salt: str) -> wire.Lookup:
        """The places of a prompt's whole chunks."""
        body = _prompt(scope, token_ids, salt)
        return await self._control.read(wire.Lookup, "POST", "/directory/lookup", json=body)

    async def keys(self) -> list[wire.KeyPlacements]:
        """All objects of every model and node."""
        found: list[wire.KeyPlacements] = []
        while True:
            path = f"/directory/keys?offset={len(found)}&limit={_PAGE}"
            page = await self._control.read(wire.Listing, "GET", path)
            found += page.keys
            if not page.keys or len(found) >= page.total:
                return found

    async def pins(self) -> int:
        """Pinned objects, of all clients."""
        return (await self._control.read(wire.Pins, "GET", "/cache/pins?limit=1")).total

    async def pin(self, scope: Scope, token_ids: Sequence[int], salt: str) -> int:
        """Pins the whole chunks of a prompt on L2; returns the number of objects."""
        return await self._pins("POST", scope, token_ids, salt)

    async def unpin(self, scope: Scope, token_ids: Sequence[int], salt: str) -> int:
        """Removes one pin of these chunks."""
        return await self._pins("DELETE", scope, token_ids, salt)

    async def aclose(self) -> None:
        """Closes its connections."""
        await self._control.aclose()

    async def _pins(self, method: str, scope: Scope, token_ids: Sequence[int], salt: str) -> int:
        body = _prompt(scope, token_ids, salt)
        return (await self._control.read(wire.PinAnswer, method, "/cache/pins", json=body)).affected


def _prompt(scope: Scope, token_ids: Sequence[int], salt: str) -> dict[str, Any]:
    return {
        "model_name": scope.model_name,
        "world_size": scope.world_size,
        "token_ids": list(token_ids),
        "cache_salt": salt,
    }
