"""What one tenant may use, and what tenants have used.

A quota limits requests and tokens a minute, and requests at a time. Requests and tokens are token buckets
that hold one minute's worth. A request is let in while its tenant's tokens are not used up. It is charged
afterwards, so that a prompt longer than what is left is not refused for ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from datetime import UTC, datetime
from heapq import merge
from math import ceil

import msgspec

MINUTE_S = 60.0
SOON_S = 1  # seconds after which to come back if too many requests run at a time: nobody knows when one ends


class TenantLimits(msgspec.Struct, frozen=True):
    """The limits of a tenant; None for none.

    Attributes:
        requests_per_minute: of any kind.
        tokens_per_minute: of prompts and answers.
        concurrent_requests: at a time.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


class Denied(msgspec.Struct, frozen=True):
    """A request over a limit: the limit's name, its value, and the seconds after which to come back."""

    what: str
    limit: int
    retry_after_s: int


class Left(msgspec.Struct, frozen=True):
    """What is left of a limit for a minute: `remaining` of `what` (`requests` or `tokens`). After `reset_s`
    seconds all of it is there again."""

    what: str
    limit: int
    remaining: int
    reset_s: float


class Use(msgspec.Struct, frozen=True):
    """Requests and tokens of a tenant since the last message, and its running requests."""

    requests: int
    tokens: int
    running: int


class _Bucket:
    """An amount that is refilled at a constant rate, up to one minute's worth."""

    __slots__ = ("_at", "_left", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._left, self._at = float(limit), 0.0

    def short_s(self, now: float, amount: float) -> float:
        """Seconds until `amount` is there; not above 0 if it is there now."""
        self._left = min(self._left + (now - self._at) * self.limit / MINUTE_S, float(self.limit))
        self._at = now
        return (amount - self._left) * MINUTE_S / self.limit

    def remaining(self, now: float) -> int:
        """Whole units that are there now; not below 0."""
        self.short_s(now, 0)
        return max(int(self._left), 0)

    def spend(self, amount: float) -> None:
        """Takes an amount out. What is left may become negative."""
        self._left -= amount


class Quota:
    """A tenant's use of its `limits`, here and at peers."""

    __slots__ = (
        "_changed", "_concurrent", "_elsewhere", "_new_requests", "_new_tokens", "_requests", "_running",
        "_tokens", "tenant",
    )  # fmt: skip

    def __init__(self, limits: TenantLimits, tenant: str = "", changed: set[Quota] | None = None) -> None:
        """The quota puts itself into `changed` whenever there is something new to `take`."""
        self.tenant = tenant
        self._requests: _Bucket | None = None
        self._tokens: _Bucket | None = None
        self._running = 0
        self._elsewhere: dict[Hashable, int] = {}  # peer → its requests that run
        self._new_requests = self._new_tokens = 0
        self._changed = set[Quota]() if changed is None else changed
        self.change(limits)

    def change(self, limits: TenantLimits) -> None:
        """Other limits. What was used still counts."""
        self._requests = _changed(self._requests, limits.requests_per_minute)
        self._tokens = _changed(self._tokens, limits.tokens_per_minute)
        self._concurrent = limits.concurrent_requests

    def enter(self, now: float) -> Denied | None:
        """Counts a new request, unless it is denied. A counted request must `leave`."""
        if self._concurrent is not None and not self.has_room:
            return Denied("concurrent_requests", self._concurrent, SOON_S)
        if self._tokens is not None and (short_s := self._tokens.short_s(now, 1)) > 0:
            return Denied("tokens_per_minute", self._tokens.limit, ceil(short_s))
        if self._requests is not None:
            if (short_s := self._requests.short_s(now, 1)) > 0:
                return Denied("requests_per_minute", self._requests.limit, ceil(short_s))
            self._requests.spend(1)
        self._new_requests += 1
        self.join()
        return None

    def left(self, now: float) -> list[Left]:
        """What is left of each limit for a minute."""
        buckets = (("requests", self._requests), ("tokens", self._tokens))
        return [
            Left(what, bucket.limit, bucket.remaining(now), bucket.short_s(now, bucket.limit))
            for what, bucket in buckets
            if bucket is not None
        ]

    @property
    def has_room(self) -> bool:
        """True if one more request may run."""
        elsewhere = sum(self._elsewhere.values()) if self._elsewhere else 0
        return self._concurrent is None or self._running + elsewhere < self._concurrent

    def join(self) -> None:
        """One more part of a request that was let in runs. It must `leave`."""
        self._running += 1
        self._changed.add(self)

    def spend(self, tokens: int) -> None:
        """A request used so many tokens."""
        if self._tokens is not None:
            self._tokens.spend(tokens)
        self._new_tokens += tokens
        self._changed.add(self)

    def leave(self) -> None:
        """A request that was let in, or a part that joined, is over."""
        self._running -= 1
        self._changed.add(self)

    def take(self) -> Use:
        """The use here since the last call."""
        use = Use(self._new_requests, self._new_tokens, self._running)
        self._new_requests = self._new_tokens = 0
        return use

    def used_elsewhere(self, now: float, peer: Hashable, use: Use) -> None:
        """A peer tells what the tenant used there."""
        for bucket, amount in ((self._requests, use.requests), (self._tokens, use.tokens)):
            if bucket is not None:
                bucket.short_s(now, amount)  # refills it first
                bucket.spend(amount)
        self.leave_elsewhere(peer)
        if use.running:
            self._elsewhere[peer] = use.running

    def leave_elsewhere(self, peer: Hashable) -> None:
        """No request runs at that peer any more."""
        self._elsewhere.pop(peer, None)


def _changed(bucket: _Bucket | None, limit: int | None) -> _Bucket | None:
    if bucket is None or limit is None:
        return _Bucket(limit) if limit is not None else None
    bucket.limit = limit
    return bucket


# --- memory -------------------------------------------------------------------------------------------------


class ByteBudget:
    """Counts bytes in memory up to a limit."""

    __slots__ = ("__weakref__", "_whole", "limit", "used")

    def __init__(self, limit: int, whole: ByteBudget | None = None) -> None:
        """`whole`: the budget of which this is a part. Its bytes count there, too."""
        # `limit`: the most bytes. Bytes already taken stay if the limit is lowered.
        self.limit, self.used, self._whole = limit, 0, whole

    def has(self, size: int) -> bool:
        """True if `size` more bytes fit."""
        return self.used + size <= self.limit and (self._whole is None or self._whole.has(size))

    def take(self, size: int) -> None:
        """Counts bytes, whether they fit or not."""
        self.used += size
        if self._whole is not None:
            self._whole.take(size)

    def give_back(self, size: int) -> None:
        """Frees bytes that were taken."""
        self.used -= size
        if self._whole is not None:
            self._whole.give_back(size)


# --- what tenants have used, by day -------------------------------------------------------------------------


DAY_S = 86_400
"""Seconds of a day. Days are those of UTC."""
MOST_DAYS = 400
"""Days with use that are kept."""
_MOST_ROWS = 100_000  # the days that are kept have this many rows; older ones are dropped first

_SORTED_AT_ONCE = 2048  # A call of `sorted` keeps the interpreter's lock. This many rows take about 1 ms.

UseKey = tuple[int, str, str]
"""The day's number since 1970, the tenant and the model; "" for none."""


class Used(msgspec.Struct, array_like=True):
    """Requests that have ended, and their tokens."""

    requests: int = 0
    failed: int = 0  # those of them that ended with an error
    prompt_tokens: int = 0  # of prompts whose tokens kvpin knows
    cached_tokens: int = 0  # those that engines reported as reused
    output_tokens: int = 0


class DayUse(msgspec.Struct):
    """The use of one tenant and one model on one day in UTC, as `2027-01-31`. `tenant` is null where requests
    need no key, `model` for requests that no engine got."""

    day: str
    tenant: str | None
    model: str | None
    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class UseBook(defaultdict[UseKey, Used]):
    """The use of all tenants. A row that is asked for begins with zeros."""

    def __init__(self, rows: Iterable[tuple[UseKey, Used]] = ()) -> None:
        super().__init__(Used, rows)

    def add(self, rows: Iterable[tuple[UseKey, Used]]) -> None:
        """Adds further counts."""
        for key, more in rows:
            counts = zip(msgspec.structs.astuple(self[key]), msgspec.structs.astuple(more), strict=True)
            self[key] = Used(*map(sum, counts))

    def prune(self) -> None:
        """Drops the oldest of too many days, and of too many rows. Only days with use count: a clock that was
        wrong for a while must not drop all the others."""
        if len(kept := sorted({day for day, _, _ in self})) > MOST_DAYS:
            for key in [key for key in self if key[0] < kept[-MOST_DAYS]]:
                del self[key]
        if len(self) > _MOST_ROWS:
            for key in sorted(self)[:-_MOST_ROWS]:
                del self[key]

    def since(self, days: int, now: float) -> Iterator[DayUse]:
        """The rows of the last `days` days, the newest first, then by tenant and model."""
        first = int(now // DAY_S) - days
        keys = [(-day, tenant, model) for day, tenant, model in self if day > first]
        parts = [sorted(keys[at : at + _SORTED_AT_ONCE]) for at in range(0, len(keys), _SORTED_AT_ONCE)]
        for day, tenant, model in merge(*parts):
            yield DayUse(
                datetime.fromtimestamp(-day * DAY_S, UTC).date().isoformat(),
                tenant or None,
                model or None,
                *msgspec.structs.astuple(self[-day, tenant, model]),
            )
