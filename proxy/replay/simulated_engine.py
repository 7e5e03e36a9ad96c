"""A model of one serving engine on a virtual clock.

It serves prompts in the order they came, one prefill at a time, and matches its cache when a prefill starts.
Only three things happen: a restore ends, a prefill ends, a stream ends. Between them everything runs at
constant rates, so no token and no step is simulated.

fifo: prefill alone; decode takes no time.
chunked: prefill and decode share steps of a bounded number of tokens, as in vLLM and SGLang. Streams slow a
prefill, and a prefill slows them much more. The KV of streams takes room until they end; a prompt waits until
there is room for it and its answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from engine_adapter.types import Tier
from proxy.core.index.blocks import BlockHash, Chain, reusable_tokens
from proxy.core.placement.rates import on_curve
from proxy.replay.cache import Taken, TieredCache
from proxy.replay.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Capacity and speed of an engine. Rates in tokens per second, times in seconds.

    Attributes:
        gpu_tokens: KV that its GPU holds.
        host_tokens: KV that its host tier holds, 0 for none.
        prefill_tok_s: prompt tokens that it computes without context.
        restore_tok_s: tokens that it restores from its host tier.
        curve: points of measured prefills: tokens computed, and their seconds; in place of `prefill_tok_s`
            and `context_tokens`, where there are any.
        context_tokens: context length at which attention takes half the time of a token; 0: prefill is
            linear.
        chunked: prefill and decode share steps; otherwise decode takes neither time nor room.
        chunk_tokens: tokens of a step with prefill.
        step_s: time of a decode step for reading the weights; a chunk of prefill hides it.
        stream_s: time that each stream adds to a step for reading its KV.
    """

    gpu_tokens: int
    host_tokens: int = 0
    prefill_tok_s: float = 20_000.0
    restore_tok_s: float = 200_000.0
    context_tokens: int = 0
    curve: tuple[tuple[float, float], ...] = ()
    chunked: bool = False
    chunk_tokens: int = 2048
    step_s: float = 0.015
    stream_s: float = 0.0003

    def blocks(self, tokens_per_block: int) -> tuple[int, int]:
        """Blocks that its GPU and its host tier hold."""
        return self.gpu_tokens // tokens_per_block, self.host_tokens // tokens_per_block

    def cache(self, tokens_per_block: int, engines: int = 1) -> TieredCache:
        """An empty cache with the room of so many engines."""
        gpu, host = self.blocks(tokens_per_block)
        return TieredCache(engines * gpu, engines * host)

    def work(self, cached: int, n_tokens: int) -> float:
        """Work to compute a prompt after its `cached` tokens, in tokens without context."""
        if self.curve:
            lengths, seconds = zip(*self.curve, strict=True)
            return on_curve(lengths, seconds, n_tokens - cached) * self.prefill_tok_s
        linear = float(n_tokens - cached)
        if not self.context_tokens:
            return linear
        return linear + (n_tokens**2 - cached**2) / (2 * self.context_tokens)

    def prefill_s(self, cached: int, n_tokens: int) -> float:
        """Seconds to compute that on an idle engine."""
        return self.work(cached, n_tokens) / self.prefill_tok_s

    def blocks_of(self, request: TraceRequest) -> int:
        """GPU blocks that a request needs while it runs."""
        tokens = request.n_tokens + (request.output_tokens if self.chunked else 0)
        return -(-tokens // request.chain.tokens_per_block)

    def fits(self, request: TraceRequest) -> bool:
        """True if the request fits into an empty engine."""
        return self.blocks_of(request) <= self.blocks(request.chain.tokens_per_block)[0]

    def rates(self, streams: int, *, prefilling: bool) -> tuple[float, float]:
        """Tokens per second of the prefill, and of each stream."""
        if not prefilling:
            return 0.0, 1 / (self.step_s + streams * self.stream_s)
        step_s = self.chunk_tokens / self.prefill_tok_s + streams * self.stream_s
        return max(self.chunk_tokens - streams, 1) / step_s, 1 / step_s


def found_tokens(chain: Chain, gpu: int, host: int) -> tuple[int, int]:
    """Cached tokens of a prompt, and how many of them must be restored, by its blocks on the two tiers."""
    size = chain.tokens_per_block
    cached = min((gpu + host) * size, reusable_tokens(chain.n_tokens, size))
    return cached, max(cached - gpu * size, 0)


class Listener:
    """Is called for what happens on an engine, and ignores it. `engine` is its position."""

    def started(self, now: float, engine: int, request: TraceRequest, gpu: int, host: int) -> None:
        """The request's prefill starts, with these cached tokens on each tier."""

    def first_token(self, now: float, engine: int, request: TraceRequest) -> None:
        """Its prefill has ended."""

    def finished(self, now: float, engine: int, request: TraceRequest) -> None:
        """It was answered in full."""

    def stored(self, engine: int, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """KV event: these blocks lie on a tier now."""

    def removed(self, engine: int, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """KV event: these blocks left a tier."""


class SimEngine:
    """One engine. Call `submit` and `advance` in the order of time, `advance` at the latest when it is `due`:
    when something happens next; `inf` if nothing will. It has `computed` so many prompt tokens so far, and
    `evicted` so many blocks from its GPU."""

    def __init__(self, position: int, model: EngineModel, tokens_per_block: int, listener: Listener) -> None:
        self._position = position
        self._model = model
        self._listener = listener
        self.cache = model.cache(tokens_per_block)
        self.due = inf
        self.computed = 0
        self.evicted = 0
        self._waiting: deque[TraceRequest] = deque()
        self._current: TraceRequest | None = None
        self._restored_at = 0.0  # when the restore for the current request ends
        self._left = 0.0  # work left of the current request
        self._decoded = 0.0  # tokens that a stream running since the beginning would have
        self._streams: list[tuple[float, int, TraceRequest]] = []  # heap by the `_decoded` at which they end
        self._last = 0.0  # the time up to which all of this is counted
        self._prefill_due = self._stream_due = inf
        self._uncached = self._reused = 0

    def submit(self, now: float, request: TraceRequest) -> None:
        """A request arrives."""
        self._waiting.append(request)
        if self._current is None:
            self._count(now)
            self._start(now)
            self._plan()

    def advance(self, now: float) -> None:
        """Does all that is due at `now`."""
        self._count(now)
        if self._streams and now >= self._stream_due:
            # Despite rounding: it was due now.
            self._decoded = max(self._decoded, self._streams[0][0])
        while self._streams and self._streams[0][0] <= self._decoded:
            self._finish(now, heappop(self._streams)[2])
        if self._current is not None and now >= self._prefill_due:
            self._end_prefill(now, self._current)
        if self._current is None:
            self._start(now)
        self._plan()

    def _count(self, now: float) -> None:
        """Counts progress at the current rates until `now`."""
        since, self._last = self._last, now
        computing = self._current is not None and self._restored_at <= since
        if now <= since or not (computing or self._streams):
            return
        prefill, decode = self._model.rates(len(self._streams), prefilling=computing)
        self._left -= prefill * (now - since)
        self._decoded += decode * (now - since)

    def _plan(self) -> None:
        """Computes when the next thing happens at the current rates."""
        self._prefill_due = self._stream_due = inf
        restoring = self._current is not None and self._restored_at > self._last
        prefill, decode = self._model.rates(
            len(self._streams), prefilling=self._current is not None and not restoring
        )
        if self._current is not None and not restoring:
            self._prefill_due = self._last + max(self._left, 0.0) / prefill
        if self._streams:
            self._stream_due = self._last + max(self._streams[0][0] - self._decoded, 0.0) / decode
        self.due = min(self._restored_at if restoring else inf, self._prefill_due, self._stream_due)

    def _start(self, now: float) -> None:
        """Starts the first waiting request, if there is room for it."""
        if not self._waiting:
            return
        request, model, listener = self._waiting[0], self._model, self._listener
        chain = request.chain
        taken = self.cache.take(chain, model.blocks_of(request))
        if taken is None:
            return
        self._waiting.popleft()
        self._current = request
        cached, host = found_tokens(chain, taken.gpu, taken.host)
        self._restored_at = now + host / model.restore_tok_s
        self._left = model.work(cached, chain.n_tokens)
        self._uncached, self._reused = chain.n_tokens - cached, taken.gpu
        self._tell_evictions(taken)
        listener.started(now, self._position, request, cached - host, host)

    def _tell_evictions(self, taken: Taken) -> None:
        """Reports evicted blocks in the order of their chains, which the index removes faster."""
        listener, evicted, gone = self._listener, taken.evicted[::-1], taken.gone[::-1]
        self.evicted += len(evicted)
        if evicted and self._model.host_tokens:
            listener.stored(self._position, Tier.HOST, evicted)
        if evicted:
            listener.removed(self._position, Tier.GPU, evicted)
        if gone:
            listener.removed(self._position, Tier.HOST, gone)

    def _end_prefill(self, now: float, request: TraceRequest) -> None:
        self._current = None
        self.computed += self._uncached
        self._fill(request.chain.hashes, self._reused)
        self._listener.first_token(now, self._position, request)
        if self._model.chunked and request.output_tokens > 1:
            # The prefill has produced the first token of the answer.
            ends = self._decoded + request.output_tokens - 1
            heappush(self._streams, (ends, request.id, request))
        else:
            self._finish(now, request)

    def _fill(self, hashes: Sequence[BlockHash], since: int) -> None:
        """Matches find these blocks from now on; those before `since` they find already."""
        if new := self.cache.fill(hashes, since):
            self._listener.stored(self._position, Tier.GPU, new)

    def _finish(self, now: float, request: TraceRequest) -> None:
        self.cache.release(request.chain.hashes, self._model.blocks_of(request))
        if request.answer:
            self._keep_answer(request)
        self._listener.finished(now, self._position, request)

    def _keep_answer(self, request: TraceRequest) -> None:
        """Stores the blocks that the answer has completed, where there is room."""
        size = request.chain.tokens_per_block
        hashes = (*request.chain.hashes, *request.answer)
        taken = self.cache.take(Chain(hashes, len(hashes) * size, size), len(hashes))
        if taken is None:
            return
        self._tell_evictions(taken)
        self._fill(hashes, taken.gpu)
        self.cache.release(hashes, len(hashes))
