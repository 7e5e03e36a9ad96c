"""The settings of a vLLM beyond those that every engine has."""

from __future__ import annotations

from typing import Annotated

import msgspec

from engine_adapter.events.sources import check_address
from engine_adapter.lmcache.options import LmCacheOptions
from engine_adapter.types import EngineSpec


class VllmOptions(LmCacheOptions, frozen=True):
    """Options of `vllm` engines.

    Attributes:
        events: ZMQ address of its KV events, by default the engine's own.
        replay: ZMQ address that replays missed events, by default the engine's own.
        dp_rank: the data-parallel rank of this engine. Without it, each rank of a server that kvpin did not
            start becomes an engine.
    """

    events: str | None = None
    replay: str | None = None
    dp_rank: Annotated[int, msgspec.Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_address("events", self.events)
        check_address("replay", self.replay)

    @property
    def rank(self) -> int | None:
        """See EngineOptions."""
        return self.dp_rank


VllmSpec = EngineSpec[VllmOptions]
