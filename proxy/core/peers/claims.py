"""Decides which of several kvpins owns an engine that only one may use.

    free ──bid──→ bidding ──SETTLE_S without a better claim──→ owner
    any ──a better claim of another kvpin──→ free

The better of two claims is the one whose kvpin uses the engine; then the one with the greater epoch; then
the one whose kvpin drew the smaller number. A bid has a greater epoch than all known claims. So an owner
stays when other kvpins join. If two kvpins
became owners without contact, the later one stays. A claim ends with its kvpin.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

# A kvpin bids for that long before it is the owner: longer than a message to another one and its answer take.
SETTLE_S = 1.0


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """A kvpin's claim to an engine: its epoch, and whether the kvpin uses the engine or still bids for it."""

    epoch: int
    is_held: bool


class OwnClaim:
    """This kvpin's claim to one engine.

    Attributes:
        is_owner: this kvpin may use the engine.
        is_locked_out: a kvpin that could not be heard holds the engine's lock.
    """

    def __init__(self, kvpin: int) -> None:
        """`kvpin` is the number that this kvpin drew."""
        self.is_owner = False
        self.is_locked_out = False
        self._kvpin = kvpin
        self._epoch = 0  # of its own claim; without one, the greatest that was heard of
        self._since: float | None = None  # when it bid; None without a claim

    @property
    def claim(self) -> Claim | None:
        """The claim as the others are told it; None without one."""
        return self._claim if self._since is not None else None

    @property
    def _claim(self) -> Claim:
        return Claim(self._epoch, self.is_owner and not self.is_locked_out)

    @property
    def is_bidding(self) -> bool:
        """True if it waits for a better claim."""
        return self._since is not None and not self.is_owner

    def decide(
        self,
        now: float,
        others: Mapping[int, Claim],
        *,
        may_bid: bool,
        is_alone: bool = False,
    ) -> None:
        """Bids, becomes the owner, or gives up.

        Args:
            now: monotonic seconds.
            others: the claims of the other kvpins that were heard lately, by the numbers that they drew.
            may_bid: others would hear the bid, or a lock keeps the engine from a second owner.
            is_alone: there is no other kvpin.
        """
        if self._since is not None and any(
            _rank(claim, kvpin) > _rank(self._claim, self._kvpin) for kvpin, claim in others.items()
        ):
            self._since, self.is_owner = None, False
        if self._since is None:
            self._epoch = max([self._epoch, *(claim.epoch for claim in others.values())])
            if others or not may_bid:
                return
            self._epoch, self._since = self._epoch + 1, now
        if is_alone or now - self._since >= SETTLE_S:
            self.is_owner = True

    def doubt(self, now: float) -> None:
        """This kvpin was paused: another one may own the engine by now. It bids again."""
        if self.is_owner:
            self.is_owner, self._since = False, now


def holder_of(claims: Mapping[int, Claim]) -> int | None:
    """The kvpin that uses an engine, by the claims to it; None if none does."""
    held = {kvpin: claim for kvpin, claim in claims.items() if claim.is_held}
    return max(held, key=lambda kvpin: _rank(held[kvpin], kvpin), default=None)


def _rank(claim: Claim, kvpin: int) -> tuple[bool, int, int]:
    return claim.is_held, claim.epoch, -kvpin
