"""KV cache groups: models with several kinds of attention keep a block table for each kind.

vLLM sends the events of each group, under the same block hashes. A prompt can be reused only as far as every
group allows it, so each event of a further group says which group it is of.
"""

from __future__ import annotations

from engine_adapter.events.fields import RemovedFields, StoredFields
from engine_adapter.types import Attention, KvGroup

# Names that vLLM gives the groups' kinds (vllm/v1/kv_cache_interface.py).
_ATTENTION = {
    "full_attention": Attention.PREFIX,
    "mla_attention": Attention.PREFIX,
    "sink_full_attention": Attention.PREFIX,
    "sliding_window": Attention.WINDOW,
    "sliding_window_mla": Attention.WINDOW,
    "chunked_local_attention": Attention.CHUNK,
    "mamba": Attention.STATE,
}
_WITH_WINDOW = (Attention.WINDOW, Attention.CHUNK)
NOT_FOLLOWED = KvGroup(-1, Attention.UNKNOWN)
"""The group of an event that belongs to no known group."""


class KvGroups:
    """The KV cache groups that one engine's events have shown.

    The first group with full attention is the main one: its events are those of a model with one group.

    Attributes:
        main: number of the main group; None before its first event.
        others: the further groups, by number.
    """

    def __init__(self, main: int | None = None) -> None:
        self.main = main
        self.others: dict[int, KvGroup] = {}

    @property
    def are_known(self) -> bool:
        """True if it is known of each group what it must hold, and one of them has full attention."""
        if self.others and self.main is None:
            return False
        return all(group.attention is not Attention.UNKNOWN for group in self.others.values())

    def group_of(self, fields: StoredFields | RemovedFields) -> KvGroup | None:
        """The event's group; None for the main one, and for engines that name no groups.

        A store says what kind its group is; a removal has only the group's number.
        """
        number = fields.group_idx
        if number is None or number == self.main:
            return None
        if not isinstance(number, int):
            return NOT_FOLLOWED
        known = self.others.get(number)
        if known is not None or not isinstance(fields, StoredFields):
            return known or NOT_FOLLOWED
        attention = _attention(fields)
        if attention is Attention.PREFIX and self.main is None:
            self.main = number
            return None
        window = fields.kv_cache_spec_sliding_window
        if attention in _WITH_WINDOW and not (isinstance(window, int) and window > 0):
            attention = Attention.UNKNOWN
        group = KvGroup(number, attention, window if attention in _WITH_WINDOW else 0)
        self.others[number] = group
        return group


def _attention(fields: StoredFields) -> Attention:
    kind = fields.kv_cache_spec_kind
    if kind is None and fields.token_ids:
        return Attention.PREFIX
    return _ATTENTION.get(kind, Attention.UNKNOWN) if isinstance(kind, str) else Attention.UNKNOWN
