"""The load of an SGLang server, from `/v1/loads` or, before 0.5.10, `/get_load`."""

from __future__ import annotations

import msgspec

from engine_adapter.errors import EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.types import EngineLoad


class _Rank(msgspec.Struct, frozen=True):
    """One data-parallel rank. The last field counts since the process started."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    token_usage: float = 0.0
    cache_hit_rate: float = 0.0
    total_prefill_uncached_tokens: int = 0


class _Loads(msgspec.Struct, frozen=True):
    loads: list[_Rank]


class _OldRank(msgspec.Struct, frozen=True):
    """The same for servers before 0.5.10. The first count includes the second."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int


class Loads:
    """Reads the load of one rank, or of all ranks together.

    Attributes:
        cache_hit_rate: share of recent prompt tokens that were reused, as the server reports it.
    """

    def __init__(self, control: ControlClient, dp_rank: int | None) -> None:
        self._control = control
        self._dp_rank = dp_rank
        self._is_old = False
        self._prefilled = 0
        self.cache_hit_rate: float | None = None

    async def read(self) -> EngineLoad:
        """Raises EngineUnavailable if the rank is missing or its process was replaced."""
        ranks = [rank for rank in await self._ranks() if self._dp_rank in (None, rank.dp_rank)]
        if not ranks:
            has_no_rank = f"it has no dp_rank {self._dp_rank}"
            raise EngineUnavailable("it does not report its load" if self._dp_rank is None else has_no_rank)
        prefilled = sum(rank.total_prefill_uncached_tokens for rank in ranks)
        if prefilled < self._prefilled:
            self._prefilled = 0
            raise EngineUnavailable("the engine was restarted")
        self._prefilled = prefilled
        self.cache_hit_rate = None if self._is_old else sum(r.cache_hit_rate for r in ranks) / len(ranks)
        return EngineLoad(
            running=sum(rank.num_running_reqs for rank in ranks),
            waiting=sum(rank.num_waiting_reqs for rank in ranks),
            gpu_usage=None if self._is_old else min(max(rank.token_usage for rank in ranks), 1.0),
        )

    def forget(self) -> None:
        """Forgets the process that was read so far."""
        self._is_old, self._prefilled = False, 0

    async def _ranks(self) -> list[_Rank]:
        if not self._is_old:
            found = await self._control.read_optional(_Loads, "/v1/loads?include=core")
            if found is not None:
                return found.loads
            self._is_old = True
        old = await self._control.read(list[_OldRank], "GET", "/get_load")
        return [_Rank(r.dp_rank, r.num_reqs - r.num_waiting_reqs, r.num_waiting_reqs) for r in old]
