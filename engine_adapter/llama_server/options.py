"""The settings of a llama-server beyond those that every engine has."""

from __future__ import annotations

from typing import Annotated

import msgspec

from engine_adapter.options import EngineOptions, Size
from engine_adapter.types import EngineSpec


class LlamaServerOptions(EngineOptions, frozen=True):
    """Options of `llama_server` engines.

    Attributes:
        host_cache_dir: directory where it saves KV files, as kvpin sees it; best in memory. A managed one has
            `/dev/shm/kvpin-<uid>`, or without room there `~/.cache/kvpin/kv`.
        host_cache_bytes: room for them. A managed one has half of what is free there at start, at most 8 GiB.
        disk_cache_dir: directory where kvpin moves the files that find no room there.
        disk_cache_bytes: room for those.
        cache_reuse: it may move KV in runs of at least so many tokens: more of a prompt comes from cache, and
            such answers are not exact. By default never, also where the server has `--cache-reuse`.
        load_s: of a router: a model that is loading and tells no progress for so many seconds has failed.
    """

    host_cache_dir: str | None = None
    host_cache_bytes: Size | None = None
    disk_cache_dir: str | None = None
    disk_cache_bytes: Size | None = None
    cache_reuse: Annotated[int, msgspec.Meta(gt=0)] | None = None
    load_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0


LlamaServerSpec = EngineSpec[LlamaServerOptions]
