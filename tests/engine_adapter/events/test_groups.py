"""The KV cache group of each event of a hybrid model."""

from __future__ import annotations

import pytest

from engine_adapter.events.fields import RemovedFields, StoredFields
from engine_adapter.events.wire import NOT_FOLLOWED, KvGroups
from engine_adapter.types import Attention, KvGroup


def stored(group=None, kind=None, tokens=(1, 2), window=None):
    return StoredFields(
        (1,),
        token_ids=list(tokens),
        group_idx=group,
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=window,
    )


def removed(group=None):
    return RemovedFields((1,), group_idx=group)


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention"])
def test_full_attention_is_the_main_one_wherever_it_stands(kind):
    groups = KvGroups()
    window = KvGroup(0, Attention.WINDOW, 128)
    assert groups.group_of(stored(0, "sliding_window", window=128)) == window
    assert groups.group_of(stored(1, kind)) is None
    assert groups.group_of(stored(2, "mamba")) == KvGroup(2, Attention.STATE)
    assert groups.group_of(removed(1)) is None
    assert groups.group_of(removed(0)) == window
    assert groups.are_known


def test_a_second_group_of_full_attention_is_a_further_one():
    groups = KvGroups()
    assert groups.group_of(stored(0, "full_attention")) is None
    assert groups.group_of(stored(1, "full_attention")) == KvGroup(1, Attention.PREFIX)


def test_a_group_without_a_kind_is_known_by_its_content():
    groups = KvGroups()
    assert groups.group_of(stored(0)) is None
    assert groups.group_of(stored(0, tokens=())) is None


def test_without_full_attention_nothing_is_known():
    """A model whose layers all have a window has no main group: what it holds is not followed."""
    groups = KvGroups()
    groups.group_of(stored(0, "sliding_window", window=128))
    assert not groups.are_known
    groups.group_of(stored(1, "full_attention"))
    assert groups.are_known


def test_a_removal_before_the_first_store_is_of_no_known_group():
    groups = KvGroups()
    assert groups.group_of(removed(1)) is NOT_FOLLOWED
    assert groups.group_of(stored(0, "full_attention")) is None
    assert groups.are_known


@pytest.mark.parametrize("kind", ["cross_attention", "unknown", "of the future", None, 7])
def test_other_kinds_are_not_known(kind):
    groups = KvGroups(main=0)
    group = groups.group_of(stored(1, kind, tokens=()))
    assert group is not None
    assert group.attention is Attention.UNKNOWN
    assert not groups.are_known


@pytest.mark.parametrize("window", [None, 0, -1, "4", 2.5])
@pytest.mark.parametrize("kind", ["sliding_window", "chunked_local_attention", "sliding_window_mla"])
def test_a_window_without_its_size_is_not_known(kind, window):
    groups = KvGroups(main=0)
    assert groups.group_of(stored(1, kind, window=window)) == KvGroup(1, Attention.UNKNOWN)


@pytest.mark.parametrize("odd", [[], {}, "x", 2.5])
def test_odd_numbers_are_of_no_group(odd):
    groups = KvGroups()
    assert groups.group_of(stored(0, "full_attention")) is None
    assert groups.group_of(stored(odd, "full_attention")) is NOT_FOLLOWED
