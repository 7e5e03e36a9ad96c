"""How far a prompt can be reused on an engine with several KV cache groups.

A prompt can be reused up to a boundary if each group holds what it needs there (`Attention`). vLLM finds the
boundary so (vllm/v1/core/kv_cache_coordinator.py): the main group gives the longest prefix; each further
kind of group shortens it to the next boundary where it hits; again, until none shortens it.

Lengths are in blocks of the pool here; a group's own blocks have one or more of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from engine_adapter.types import Attention, KvGroup

Runs = Sequence[tuple[int, int]]
"""Where blocks in a row begin and end that a kind of group holds, in order, in the group's own blocks."""


@dataclass(frozen=True, slots=True)
class GroupKind:
    """Groups that need the same of a prompt. A prompt needs it of all of them.

    Attributes:
        attention: what they need.
        window: tokens of the window or chunk.
        size: their block size, in blocks of the pool.
        bits: their location bits.
        tokens_per_block: the pool's block size.
    """

    attention: Attention
    window: int
    size: int
    bits: int
    tokens_per_block: int

    @property
    def tokens(self) -> int:
        """Tokens of one of their blocks."""
        return self.size * self.tokens_per_block

    def runs(self, stretches: Iterable[tuple[int, int]], end: int) -> Runs:
        """Runs of their blocks, from the parts of a chain that they all hold: where those begin and end, in
        order, in blocks of the pool. Only the first `end` blocks of the chain count."""
        runs, size = list[tuple[int, int]](), self.size
        for start, stop in stretches:
            # A block counts where it ends: only its last block of the pool is marked.
            first, last = -(-(start + 1) // size) - 1, min(stop, end) // size
            if runs and first <= runs[-1][1]:
                first, last = runs[-1][0], max(runs.pop()[1], last)
            if last > first:
                runs.append((first, last))
        return runs

    def hit(self, runs: Runs, length: int, alignment: int) -> int:
        """The longest boundary up to `length` at which they hit. `alignment` divides every boundary."""
        most, step = length // self.size, max(alignment // self.size, 1)
        match self.attention:
            case Attention.PREFIX:
                found = min(runs[0][1], most) if runs and not runs[0][0] else 0
            case Attention.WINDOW:
                found = self._window(runs, most, step)
            case Attention.CHUNK:
                found = self._chunk(runs, most)
            case _:  # a state; unknown kinds have no rule, see `KvGroups.add`
                found = next(self._ends(runs, most, step), (0, 0))[1]
        return found // step * step * self.size

    def _ends(self, runs: Runs, most: int, step: int) -> Iterator[tuple[int, int]]:
        """Each run's begin and its last boundary, from the right."""
        for first, last in reversed(runs):
            end = min(last, most) // step * step
            if end > first:
                yield first, end

    def _window(self, runs: Runs, most: int, step: int) -> int:
        need = -(-(self.window - 1) // self.tokens)
        for first, end in self._ends(runs, most, step):
            if end - first >= need or not first:
                return end
        return 0

    def _chunk(self, runs: Runs, most: int) -> int:
        start = most * self.tokens // self.window * self.window // self.tokens
        for first, last in runs:
            if first <= start < last:
                return min(last, most)
        return start


class KvGroups:
    """The further KV cache groups of one engine.

    Attributes:
        bits: the location bit of each.
        mask: all these bits.
        kinds: the groups by what they need.
        shape: what each needs, in the order of their bits. Equal shapes that hold the same reach as far.
        alignment: every boundary is a multiple of it, in blocks of the pool.
        is_known: False if it is not known of each group what it needs.
    """

    def __init__(self, tokens_per_block: int) -> None:
        """`tokens_per_block`: the pool's block size."""
        self._tokens_per_block = tokens_per_block
        self._sizes: dict[KvGroup, int] = {}
        self.bits: dict[int, int] = {}
        self.mask = 0
        self.kinds: list[GroupKind] = []
        self.shape = ""
        self.alignment = 1
        self.is_known = True
        self.held = 0

    def add(self, group: KvGroup, tokens_per_block: int, bit: int) -> None:
        """A new group, with blocks of so many tokens. Its blocks have this location bit."""
        size, rest = divmod(tokens_per_block, self._tokens_per_block)
        self.bits[group.number] = bit
        self.mask |= bit
        self.shape += f"{group.attention} {group.window} {tokens_per_block}, "
        if rest or not size or group.attention is Attention.UNKNOWN:
            self.is_known = False
            return
        self._sizes[group] = size
        by_need: dict[tuple[Attention, int, int], int] = {}
        for each, blocks in self._sizes.items():
            need = (each.attention, each.window, blocks)
            by_need[need] = by_need.get(need, 0) | self.bits[each.number]
        self.kinds = [GroupKind(*need, bits, self._tokens_per_block) for need, bits in by_need.items()]
        self.alignment = lcm(*self._sizes.values())

    def reach(
        self, masks: Sequence[int], ends: Sequence[int], held: int, pending: int = 0
    ) -> tuple[int, Attention | None]:
        """The boundary up to which a prompt can be reused, in blocks of the pool, and the kind of groups that
        lack what they need beyond it; None if no group does.

        Args:
            masks: location bits along the prompt's chain, by stretches of equal bits.
            ends: where each stretch ends.
            held: leading blocks that the main group holds, without those that no prompt of this length can
                reuse.
            pending: the location bit of blocks that requests in flight will leave in every group; 0: they do
                not count.
        """
        length = held // self.alignment * self.alignment
        runs = [kind.runs(_stretches(masks, ends, kind.bits, pending), held) for kind in self.kinds]
        lacks = None
        while length:
            before = length
            for kind, own in zip(self.kinds, runs, strict=True):
                found = kind.hit(own, length, self.alignment)
                if found < length:
                    length, lacks = found, kind.attention
            if length == before:
                break
        return length, lacks


def _stretches(
    masks: Sequence[int], ends: Sequence[int], bits: int, pending: int
) -> Iterator[tuple[int, int]]:
    """The parts of a chain whose blocks have all these location bits, or the bit of pending blocks."""
    start = 0
    for mask, end in zip(masks, ends, strict=True):
        if mask & bits == bits or mask & pending:
            yield start, end
        start = end
