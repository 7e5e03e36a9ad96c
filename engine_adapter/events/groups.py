"""Chooses the KV cache group to follow, for models with several kinds of attention.

vLLM keeps a block table for each group and sends events of each, under the same block hashes. kvpin follows
the group with full attention, because a prompt can be reused at most that far. The other groups may hold
less, so with more than one group predictions are never firm.
"""

from __future__ import annotations

from engine_adapter.events.fields import RemovedFields, StoredFields

_FULL = frozenset({"full_attention", "mla_attention", "sink_full_attention"})


class KvGroups:
    """The KV cache groups that one engine's events have shown.

    Attributes:
        followed: number of the followed group; None while none is.
        several: there are other groups beside the followed one.
    """

    def __init__(self) -> None:
        self.followed: int | None = None
        self.several = False

    def follows(self, fields: StoredFields | RemovedFields) -> bool:
        """Whether the event belongs to the followed group, or the engine names no groups.

        A store says what kind its group is; a removal has only the group's number.
        """
        group = fields.group_idx
        if group is None or group == self.followed:
            return True
        kind = None
        if isinstance(fields, StoredFields):
            kind = fields.kv_cache_spec_kind
            if self.followed is None and _is_full(fields):
                self.followed = group
                return True
        # A removal before the first store says nothing about the group.
        self.several = self.several or self.followed is not None or kind is not None
        return False


def _is_full(fields: StoredFields) -> bool:
    kind = fields.kv_cache_spec_kind
    if kind is None:
        return bool(fields.token_ids)
    return isinstance(kind, str) and kind in _FULL
