"""An upper bound of hits: one cache with the room of all engines, filled the moment a request arrives."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.core.index.blocks import reusable_tokens
from proxy.replay.cache import TieredCache
from proxy.replay.simulated_engine import EngineModel
from proxy.replay.trace import TraceRequest


def oracle_hits(requests: Sequence[TraceRequest], engines: int, model: EngineModel) -> int:
    """Cached tokens of the requests, in this order, in an LRU cache with the room of all engines."""
    size = requests[0].chain.tokens_per_block
    cache = TieredCache(engines * (model.gpu_tokens // size + model.host_tokens // size))
    hits = 0
    for request in requests:
        hashes = request.chain.hashes
        taken = cache.take(hashes, len(hashes))
        if taken is not None:  # which it is: what fits one engine fits all of them
            hits += min(taken.gpu * size, reusable_tokens(request.n_tokens, size))
            cache.fill(hashes)
            cache.release(hashes, len(hashes))
    return hits
