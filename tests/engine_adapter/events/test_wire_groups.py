"""Which KV cache group of a hybrid model is followed. Events through the decoder: test_kv_events.py."""

from __future__ import annotations

import pytest

from engine_adapter.events.fields import RemovedFields, StoredFields
from engine_adapter.events.wire import KvGroups


def stored(group=None, kind=None, tokens=(1, 2)):
    return StoredFields((1,), token_ids=list(tokens), group_idx=group, kv_cache_spec_kind=kind)


def removed(group=None):
    return RemovedFields((1,), group_idx=group)


def test_an_engine_that_knows_no_groups_is_followed():
    groups = KvGroups()
    assert groups.follows(stored())
    assert groups.follows(removed())
    assert not groups.several


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention"])
def test_full_attention_is_followed_wherever_it_stands(kind):
    groups = KvGroups()
    assert not groups.follows(stored(0, "sliding_window"))
    assert groups.follows(stored(1, kind))
    assert not groups.follows(stored(2, "mamba"))
    assert groups.follows(removed(1))
    assert not groups.follows(removed(0))
    assert groups.several


def test_a_second_group_of_full_attention_is_another():
    groups = KvGroups()
    assert groups.follows(stored(0, "full_attention"))
    assert not groups.several
    assert not groups.follows(stored(1, "full_attention"))
    assert groups.several


def test_a_group_without_a_kind_is_followed_by_its_content():
    groups = KvGroups()
    assert not groups.follows(stored(1, tokens=()))
    assert groups.follows(stored(0))
    assert groups.follows(stored(0, tokens=()))


def test_removals_before_the_first_store_say_nothing():
    groups = KvGroups()
    assert not groups.follows(removed(1))
    assert groups.follows(stored(0, "full_attention"))
    assert not groups.several


@pytest.mark.parametrize("odd", [[], {}, "x", -1, 2.5])
def test_odd_values_are_other_groups(odd):
    groups = KvGroups()
    assert groups.follows(stored(0, "full_attention"))
    assert not groups.follows(stored(odd, odd))
