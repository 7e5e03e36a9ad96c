"""One engine as the proxy sees it now. State only, as in `fleet.py`."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Protocol

from engine_adapter import Capability, EngineAdapter, EngineInfo
from proxy.core.audit import EngineAudit
from proxy.core.index.learned import LearnedBlocks
from proxy.core.index.view import EngineView
from proxy.core.placement.load import EngineLedger
from proxy.core.placement.tiering import AheadCounts
from proxy.fleet.lease import Lease

# The block size of pools, unless an engine's own is smaller.
TOKENS_PER_BLOCK = 16
# What an engine that does not say its capacity is taken to hold, in tokens.
ASSUMED_CAPACITY_TOKENS = 131_072
# Blocks an engine is remembered to have in tiers below its GPU that its events do not tell of.
HINTED_BLOCKS = 65_536


class EngineState(StrEnum):
    """Only `ready` engines get requests."""

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

    def describe(self) -> dict[str, str | int | None]:
        """Its state, pid, port, restarts and last exit code, for people."""


class Engine:
    """One engine: its adapter, what it said of itself, its load, its audit."""

    def __init__(self, adapter: EngineAdapter) -> None:
        self.adapter = adapter
        self.id = adapter.spec.id
        self.state = EngineState.CONNECTING
        self.info: EngineInfo | None = None
        self.ledger = EngineLedger()
        self.audit = EngineAudit()
        self.learned = LearnedBlocks(ASSUMED_CAPACITY_TOKENS // TOKENS_PER_BLOCK)
        self.below = LearnedBlocks(HINTED_BLOCKS)
        self.ahead = AheadCounts()
        self.view: EngineView | None = None
        self.process: Process | None = None
        self.last_error: str | None = None
        self.check_now = asyncio.Event()
        self.unanswered: set[Lease] = set()

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
        """A request failed on it: no more until the monitor has looked, which it does at once."""
        self.last_error = str(error)
        if self.state is EngineState.READY:
            self.state = EngineState.SUSPECT
        self.check_now.set()

    def abandon(self) -> None:
        """The engine is lost: requests whose answer has not begun wait no longer."""
        for lease in self.unanswered:
            lease.give_up()
