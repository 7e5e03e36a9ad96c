"""The rates of one server: medians of its measured operations."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from statistics import median

from engine_adapter.llama_server.saved_entry import Saved
from engine_adapter.types import Tier

WINDOW = 32
# The time of a shorter prefill is mostly the round trip.
MIN_PREFILL_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of this server; every rate is above 0. The defaults are first guesses. Saves count as cheap:
    its real rate is learned only if it is tried.

    Attributes:
        prefill_tok_s: prompt tokens computed per second.
        save_bytes_s: bytes per second from a slot to the host tier.
        restore_bytes_s: bytes per second from the host tier to a slot.
        disk_bytes_s: bytes per second from the disk tier to the host tier.
        bytes_per_token: bytes of a saved file per token.
        hold_s: usual seconds that a request holds a slot.
        reuse_probability: prior that a conversation goes on right after an answer.
        half_life_s: idle seconds that halve this probability.
        save_overhead_s: seconds of a save that do not depend on its bytes.
        restore_overhead_s: the same for a restore.
    """

    prefill_tok_s: float = 500.0
    save_bytes_s: float = 1e9
    restore_bytes_s: float = 2e9
    disk_bytes_s: float = 400e6
    bytes_per_token: float = 1000.0
    hold_s: float = 2.0
    reuse_probability: float = 0.8
    half_life_s: float = 1800.0
    save_overhead_s: float = 0.002
    restore_overhead_s: float = 0.002

    def prefill_s(self, tokens: int) -> float:
        """Seconds to compute `tokens` prompt tokens."""
        return tokens / self.prefill_tok_s

    def save_s(self, tokens: int) -> float:
        """Seconds to save a slot of `tokens` tokens."""
        return self.save_overhead_s + tokens * self.bytes_per_token / self.save_bytes_s

    def restore_s(self, tokens: int) -> float:
        """Seconds to restore a file of `tokens` tokens that lies in the host tier."""
        return self.restore_overhead_s + tokens * self.bytes_per_token / self.restore_bytes_s

    def file_s(self, entry: Saved) -> float:
        """Seconds to restore this file from its tier."""
        seconds = self.restore_overhead_s + entry.size / self.restore_bytes_s
        return seconds + entry.size / self.disk_bytes_s if entry.tier is Tier.DISK else seconds


class RateBook:
    """Learns `Rates` from measured operations. Each is the median of its last samples. The first guess counts
    as two samples, so one outlier has no effect."""

    def __init__(self) -> None:
        self.view = Rates()
        self._samples: dict[str, deque[float]] = {}

    def prefilled(self, tokens: int, seconds: float) -> None:
        """`tokens` prompt tokens were computed in `seconds`."""
        if tokens >= MIN_PREFILL_TOKENS:
            self._learn("prefill_tok_s", tokens, seconds)

    def saved(self, tokens: int, size: int, seconds: float) -> None:
        """A slot of `tokens` tokens became a file of `size` bytes in `seconds`."""
        if tokens:  # exact: it is a property of the model
            self.view = replace(self.view, bytes_per_token=size / tokens)
        self._learn("save_bytes_s", size, seconds - self.view.save_overhead_s)

    def restored(self, size: int, seconds: float) -> None:
        """A file of `size` bytes in the host tier went into a slot in `seconds`."""
        self._learn("restore_bytes_s", size, seconds - self.view.restore_overhead_s)

    def held(self, seconds: float) -> None:
        """A request held its slot for `seconds`."""
        self._learn("hold_s", seconds, 1.0)

    def _learn(self, rate: str, amount: float, per: float) -> None:
        if amount > 0 and per > 0:
            guess = getattr(self.view, rate)
            samples = self._samples.setdefault(rate, deque((guess, guess), maxlen=WINDOW))
            samples.append(amount / per)
            self.view = replace(self.view, **{rate: median(samples)})
