"""The settings by which the operator names an LMCache."""

from __future__ import annotations

from engine_adapter.events.options import EventOptions
from engine_adapter.types import EngineSpec


class LmCacheOptions(EventOptions, frozen=True):
    """Options of engines with KV events that may have an LMCache below them.

    Attributes:
        lmcache: HTTP address of the LMCache server beside the engine.
        lmcache_coordinator: address of the LMCache coordinator, by default that server's own.
    """

    lmcache: str | None = None
    lmcache_coordinator: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lmcache", "lmcache_coordinator"):
            address = getattr(self, name)
            if address is not None and not address.startswith(("http://", "https://")):
                raise ValueError(f"{name}: {address!r} is not an http:// or https:// address")
        if self.lmcache_coordinator is not None and self.lmcache is None:
            raise ValueError("lmcache_coordinator goes with lmcache=http://HOST:PORT")


LmCacheSpec = EngineSpec[LmCacheOptions]
