"""What tenants have used: requests and tokens, by day, tenant and model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from heapq import merge

import msgspec

DAY_S = 86_400
"""Seconds of a day. Days are those of UTC."""
MOST_DAYS = 400
"""Days with use that are kept."""
# The days that are kept have this many rows; older ones are dropped first.
_MOST_ROWS = 100_000

# A call of `sorted` keeps the interpreter's lock. This many rows take about 1 ms.
_SORTED_AT_ONCE = 2048

UseKey = tuple[int, str, str]
"""The day's number since 1970, the tenant and the model; "" for none."""


class Used(msgspec.Struct, array_like=True):
    """Requests that have ended, and their tokens.

    Attributes:
        failed: those of them that ended with an error.
        prompt_tokens: of prompts whose tokens kvpin knows.
        cached_tokens: those that engines reported as reused.
    """

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
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
        """Begins with these rows."""
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
