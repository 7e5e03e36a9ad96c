"""The engines that only one kvpin may use: claims them for this one, or leaves them to another one.

`proxy/core/peers/messages.py` decides. The claims travel with the description of each engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from proxy.core.peers.messages import Claim, OwnClaim, holder_of
from proxy.fleet.engine import Engine, EngineState
from proxy.fleet.fleet import Fleet

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ToldClaim:
    """A claim of another kvpin."""

    claim: Claim
    name: str  # the kvpin, for people
    models: frozenset[str]  # those of its engines there; none while they are not connected
    socket: str | None  # serves HTTP to this kvpin; None if this kvpin cannot reach it


class Owners:
    """This kvpin's claims to engines, and the owners of all other engines. `elsewhere`: engine → the kvpin
    that uses it in place of this one."""

    def __init__(self, kvpin: int, fleet: Fleet) -> None:
        """Engines that join `fleet` from now on wait until they are claimed. `kvpin` is the number that this
        kvpin drew."""
        self._kvpin, self._fleet = kvpin, fleet
        self.elsewhere: dict[str, ToldClaim] = {}
        self._claims: dict[str, OwnClaim] = {}  # by URL: engines of one server have one owner
        fleet.claims_engines = True

    @property
    def has_claimed(self) -> bool:
        """True if there are engines that only one kvpin may use."""
        return bool(self._claims)

    @property
    def is_bidding(self) -> bool:
        """True if the owner of an engine will soon be known."""
        return any(claim.is_bidding for claim in self._claims.values())

    def claim_of(self, engine: Engine) -> Claim | None:
        """This kvpin's claim to an engine."""
        if (own := self._claims.get(engine.adapter.spec.url)) is None:
            return None
        own.is_locked_out = _is_locked_out(engine)  # since the last decision, too
        return own.claim

    def decide(
        self,
        now: float,  # monotonic seconds
        others: Mapping[str, Mapping[int, ToldClaim]],  # URL → claims, by the numbers that kvpins drew
        *,
        is_heard: bool,  # other kvpins hear what this one tells
        is_alone: bool,  # there is no other kvpin
        may_own: bool = True,  # of the workers of one kvpin, only the one that speaks for all claims engines
    ) -> None:
        """Takes the engines that this kvpin owns by now. Leaves engines that another kvpin owns."""
        claimed, self.elsewhere = dict[str, OwnClaim](), {}
        for engine in self._fleet.engines.values():
            if not engine.adapter.one_owner:
                continue
            url = engine.adapter.spec.url
            own = claimed.setdefault(url, self._claims.get(url) or OwnClaim(self._kvpin))
            told = others.get(url, {})
            claims = {kvpin: each.claim for kvpin, each in told.items()}
            own.is_locked_out = _is_locked_out(engine)
            own.decide(
                now, claims, may_bid=may_own and (is_heard or engine.adapter.has_lock), is_alone=is_alone
            )
            if own.is_owner and not engine.mine.is_set():
                log.info("this kvpin owns the engine", engine=engine.id)
                engine.take()
            elif not own.is_owner:
                if (holder := holder_of(claims)) is not None:
                    self.elsewhere[engine.id] = told[holder]
                _give(engine, self.elsewhere.get(engine.id))
        self._claims = claimed

    def doubt(self, now: float) -> None:
        """This kvpin was paused. Engines under a lock are not affected."""
        for engine in self._fleet.engines.values():
            own = self._claims.get(engine.adapter.spec.url)
            if own is not None and not engine.adapter.has_lock:
                own.doubt(now)


def _is_locked_out(engine: Engine) -> bool:
    return engine.mine.is_set() and engine.state is EngineState.ELSEWHERE


def _give(engine: Engine, to: ToldClaim | None) -> None:
    """Leaves an engine to the kvpin that uses it; None while none does."""
    owner = to.name if to is not None else None
    is_served = to is not None and to.socket is not None and bool(to.models)
    if not engine.mine.is_set() and (engine.owner, engine.is_served_there) == (owner, is_served):
        return
    if owner is not None and engine.owner != owner:
        log.info("another kvpin owns the engine", engine=engine.id, owner=owner)
    engine.give_to(owner, is_served_there=is_served)
