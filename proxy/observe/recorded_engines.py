"""The figures of engines for a recording: what they told, and what kvpin measured."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

from engine_adapter import Tier
from proxy.fleet.engine import Engine
from proxy.fleet.fleet import Fleet
from proxy.fleet.pool import Pool
from proxy.replay.recorded import RecordedEngine
from proxy.request.records import RequestRecord

# The median of this many streams is the pace of an engine's answers.
WINDOW = 256
# A shorter answer says little about the pace.
MIN_OUTPUT = 8


class EngineWatch:
    """Measures the pace of answers, and tells all figures of the engines."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._token_s = defaultdict[str, deque[float]](lambda: deque(maxlen=WINDOW))

    def observe(self, record: RequestRecord) -> None:
        """A request ended."""
        pace_s = seconds_per_token(record)
        if pace_s is not None and record.engine is not None:
            self._token_s[record.engine].append(pace_s)

    def engines(self) -> list[RecordedEngine]:
        """The engines that are connected, as they are known now."""
        return [
            self._recorded(pool, engine)
            for pool in self._fleet.pools.values()
            for engine in pool.engines.values()
        ]

    def _recorded(self, pool: Pool, engine: Engine) -> RecordedEngine:
        info, rates = engine.info, pool.placer.books[engine.id].rates
        size = (info.tokens_per_block if info is not None else None) or 0
        blocks = (info.gpu_blocks, info.host_blocks) if info is not None else (None, None)
        gpu_tokens, host_tokens = (each * size if each is not None and size else None for each in blocks)
        paces = self._token_s.get(engine.id)
        return RecordedEngine(
            id=engine.id,
            kind=engine.adapter.spec.kind,
            model=pool.model,
            gpu_tokens=gpu_tokens,
            host_tokens=host_tokens,
            prefill=[(tokens, seconds * rates.pace) for tokens, seconds in rates.pool.curve],
            samples=rates.pool.samples,
            interference=rates.pool.interference if rates.pool.learned else None,
            restore_tok_s=rates.pool.measured_restore_tok_s(Tier.HOST),
            token_s=median(paces) if paces else None,
        )


def seconds_per_token(record: RequestRecord) -> float | None:
    """Seconds from one token of a stream to the next; None where that is not known."""
    output, first, ended = record.output_tokens, record.first_byte_s, record.answered_s
    if not record.stream or record.error is not None or record.died or record.placed is None:
        return None
    if output is None or output < MIN_OUTPUT or first is None or ended is None:
        return None
    return (record.arrived + ended - record.placed - first) / (output - 1)
