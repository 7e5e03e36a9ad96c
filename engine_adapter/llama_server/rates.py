"""The rates of one server: medians of its measured operations."""

from __future__ import annotations

from collections import deque
from statistics import median

from engine_adapter.llama_server.plan import Rates

WINDOW = 32
# The time of a shorter prefill is mostly the round trip.
MIN_PREFILL_TOKENS = 32

# First guesses. Saving counts as cheap: its real rate is learned only if it is tried.
PREFILL_TOK_S = 500.0
SAVE_BYTES_S = 1e9
RESTORE_BYTES_S = 2e9
DISK_BYTES_S = 400e6
BYTES_PER_TOKEN = 1000.0
HOLD_S = 2.0
# Prior that a conversation goes on after an answer.
REUSE_PROBABILITY = 0.8


class RateBook:
    """Learns `Rates` from measured operations."""

    def __init__(self) -> None:
        self._prefill = _Median(PREFILL_TOK_S)
        self._save = _Median(SAVE_BYTES_S)
        self._restore = _Median(RESTORE_BYTES_S)
        self._bytes_per_token = BYTES_PER_TOKEN
        self._hold = _Median(HOLD_S)
        self.view = self._view()

    def prefilled(self, tokens: int, seconds: float) -> None:
        """`tokens` prompt tokens were computed in `seconds`."""
        if tokens >= MIN_PREFILL_TOKENS:
            self._learn(self._prefill, tokens, seconds)

    def saved(self, tokens: int, size: int, seconds: float) -> None:
        """A slot of `tokens` tokens became a file of `size` bytes in `seconds`."""
        if tokens:
            self._bytes_per_token = size / tokens  # exact: it is a property of the model
            self.view = self._view()
        self._learn(self._save, size, seconds - self.view.save_overhead_s)

    def restored(self, size: int, seconds: float) -> None:
        """A file of `size` bytes in the host tier went into a slot in `seconds`."""
        self._learn(self._restore, size, seconds - self.view.restore_overhead_s)

    def held(self, seconds: float) -> None:
        """A request held its slot for `seconds`."""
        self._learn(self._hold, seconds, 1.0)

    def _learn(self, of: _Median, amount: float, per: float) -> None:
        if amount > 0 and per > 0:
            of.add(amount / per)
            self.view = self._view()

    def _view(self) -> Rates:
        return Rates(
            prefill_tok_s=self._prefill.value,
            save_bytes_s=self._save.value,
            restore_bytes_s=self._restore.value,
            disk_bytes_s=DISK_BYTES_S,
            bytes_per_token=self._bytes_per_token,
            hold_s=self._hold.value,
            reuse_probability=REUSE_PROBABILITY,
        )


class _Median:
    """The median of the last samples. The first guess counts as two samples, so one outlier has no effect."""

    def __init__(self, guess: float) -> None:
        self.value = guess
        self._samples: deque[float] = deque((guess, guess), maxlen=WINDOW)

    def add(self, sample: float) -> None:
        self._samples.append(sample)
        self.value = median(self._samples)
