"""One engine as the proxy sees it now. State only, as in `fleet.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

import structlog

from engine_adapter import Capability, EngineAdapter, EngineInfo
from proxy.core.audit import EngineAudit
from proxy.core.index.learned import LearnedBlocks
from proxy.core.index.view import EngineView
from proxy.core.placement.load import EngineLedger
from proxy.core.placement.tiering import AheadCounts
from proxy.fleet.lease import Lease
from proxy.fleet.salts import TenantSalts

log = structlog.get_logger(__name__)

# The block size of pools, unless an engine's own is smaller.
TOKENS_PER_BLOCK = 16
# What an engine that does not say its capacity is taken to hold, in tokens.
ASSUMED_CAPACITY_TOKENS = 131_072
# Blocks an engine is remembered to have in tiers below its GPU that its events do not tell of.
HINTED_BLOCKS = 65_536


class EngineState(StrEnum):
    """Only `ready` engines get requests; where there is none, `suspect` ones."""

    CONNECTING = "connecting"
    READY = "ready"
    SUSPECT = "suspect"  # a request failed on it; being checked
    DOWN = "down"
    DRAINING = "draining"  # finishes what it has
    REFUSED = "refused"  # not used: tenants would share its KV


class Process(Protocol):
    """An engine's process, where kvpin runs it."""

    @property
    def starting(self) -> bool:
        """Whether it is in its first start: not well yet, and nothing is wrong."""

    @property
    def error(self) -> str | None:
        """Why it does not run; None while nothing is wrong."""

    def describe(self) -> dict[str, str | int | None]:
        """Its state, pid, port, restarts, last exit code and error, for people."""


class Engine:
    """One engine: its adapter, what it said of itself, its load, its audit."""

    def __init__(self, adapter: EngineAdapter, on_ready: Callable[[], None] = lambda: None) -> None:
        """`on_ready` is called whenever the engine begins to take requests."""
        self.adapter = adapter
        self.id = adapter.spec.id
        self._state = EngineState.CONNECTING
        self._on_ready = on_ready
        self._failed = 0  # requests, since it was ready last
        self.info: EngineInfo | None = None
        self.ledger = EngineLedger()
        self.audit = EngineAudit()
        self.learned = LearnedBlocks(ASSUMED_CAPACITY_TOKENS // TOKENS_PER_BLOCK)
        self.below = LearnedBlocks(HINTED_BLOCKS)
        self.salts = TenantSalts()
        self.ahead = AheadCounts()
        self.view: EngineView | None = None
        self.process: Process | None = None
        self.last_error: str | None = None
        self.check_now = asyncio.Event()
        self.leases: set[Lease] = set()

    @property
    def state(self) -> EngineState:
        """Whether it takes requests, and if not, why."""
        return self._state

    @state.setter
    def state(self, state: EngineState) -> None:
        self._state = state
        if state is EngineState.READY:
            self._failed = 0
            self._on_ready()

    @property
    def unanswered(self) -> list[Lease]:
        """The requests on it whose answer has not begun."""
        return [lease for lease in self.leases if not lease.begun.is_set()]

    def can(self, capability: Capability) -> bool:
        """Whether the engine, as connected, declares the capability."""
        return self.info is not None and capability in self.info.capabilities

    @property
    def adapters(self) -> frozenset[str]:
        """The LoRA adapters it serves, by name."""
        return self.info.adapters if self.info is not None else frozenset()

    @property
    def removals(self) -> int:
        """Blocks its events took out of the view so far."""
        return self.view.counts.removed if self.view is not None else 0

    def suspect(self, error: Exception) -> None:
        """A request failed on it: the monitor checks it at once, and other engines are preferred until then.
        Logs the first of the requests that fail together."""
        if self.state in (EngineState.CONNECTING, EngineState.DOWN):
            return  # known, and counted by `abandon`
        self.last_error = str(error)
        if not self._failed:
            log.warning("a request failed on the engine: checking it", engine=self.id, error=str(error))
        self._failed += 1
        if self.state is EngineState.READY:
            self.state = EngineState.SUSPECT
        self.check_now.set()

    def abandon(self) -> None:
        """The engine is lost: ends its requests. Those whose answer has not begun can go elsewhere."""
        failed, self._failed = self._failed + len(self.leases), 0
        if failed:
            log.warning("requests failed with the lost engine", engine=self.id, requests=failed)
        for lease in self.leases:
            lease.give_up()
