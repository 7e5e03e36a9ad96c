"""The blocks that answers leave in a cache. A recording tells them as blocks of the prompt that goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from proxy.core.index.blocks import BlockHash

if TYPE_CHECKING:
    from proxy.replay.trace import TraceRequest


def answer_blocks(requests: Sequence[TraceRequest]) -> list[tuple[BlockHash, ...]]:
    """The full blocks after the prompt that each request's answer completes, in the order of the requests;
    none where no later prompt goes on with the answer.

    The last token of an answer is never computed, so that it fills no block.
    """
    found: list[tuple[BlockHash, ...]] = [()] * len(requests)
    last_of, ending = dict[str, int](), dict[BlockHash, int]()
    for at, request in enumerate(requests):
        hashes = request.chain.hashes
        if request.session is not None:
            before = last_of.get(request.session)
            last_of[request.session] = at
        else:
            before = next((ending[block] for block in reversed(hashes) if block in ending), None)
            if hashes:
                ending[hashes[-1]] = at
        if before is not None:
            found[before] = found[before] or _between(requests[before], hashes)
    return found


def _between(request: TraceRequest, later: Sequence[BlockHash]) -> tuple[BlockHash, ...]:
    """The blocks of a later prompt that the request's answer completes; none if it does not go on."""
    own = len(request.chain.hashes)
    full = (request.n_tokens + request.output_tokens - 1) // request.chain.tokens_per_block
    return tuple(later[own:full]) if tuple(later[:own]) == request.chain.hashes else ()
