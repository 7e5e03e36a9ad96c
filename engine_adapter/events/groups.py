"""Models with several kinds of attention: which of their KV cache groups is followed.

vLLM keeps a block table for each group and tells of each of them, under the same block hashes. A prompt can
be reused as far as its full attention reaches, so that group is followed; how far the others still hold it
is not known, and with more than one group predictions are never firm.
"""

from __future__ import annotations

from engine_adapter.events.keys import Fields

_FULL = frozenset({"full_attention", "mla_attention", "sink_full_attention"})


class KvGroups:
    """The KV cache groups of one engine, as far as its events showed them.

    Attributes:
        several: there is more than the one that is followed.
    """

    def __init__(self) -> None:
        self._followed: object = None
        self.several = False

    def follows(self, fields: Fields) -> bool:
        """Whether the event counts: it is of the group followed, or of an engine that does not say.

        Stores tell what their group is; removals carry its number alone.
        """
        group = fields.get("group_idx")
        if group is None or group == self._followed:
            return True
        if self._followed is None and _is_full(fields):
            self._followed = group
            return True
        # A removal before the first store tells nothing of the group.
        self.several = self.several or self._followed is not None or "kv_cache_spec_kind" in fields
        return False


def _is_full(fields: Fields) -> bool:
    kind = fields.get("kv_cache_spec_kind")
    if kind is None:
        return bool(fields.get("token_ids"))
    return isinstance(kind, str) and kind in _FULL
