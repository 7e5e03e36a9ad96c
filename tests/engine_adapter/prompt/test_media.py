"""Markers of images, audio and video."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.prompt.extra_ids import extra_id
from engine_adapter.prompt.media import mark_embeds, mark_media, media_extra_id
from engine_adapter.types import MediaSpan

spans = st.lists(st.builds(MediaSpan, st.text(), st.integers(0, 9), st.integers(1, 5)), max_size=6)


def test_an_item_marks_the_token_it_begins_at():
    ids = mark_media(6, [MediaSpan("cat", 2, 3), MediaSpan("dog", 5, 1)])
    assert ids is not None
    assert ids.tolist() == [0, 0, media_extra_id("cat"), 0, 0, media_extra_id("dog")]


def test_the_identity_is_a_typed_hash_of_its_bytes():
    assert media_extra_id("Ü") == extra_id("media", "Ü".encode())
    assert media_extra_id("x") != extra_id("prompt_table", b"x")


def test_a_prompt_without_items_has_no_extra_ids():
    assert mark_media(6, []) is None
    assert mark_embeds(None, 6, []) is None


def test_embeddings_mark_their_blocks_also_beside_an_item():
    one, two = (extra_id("prompt_embeds_rows", digest) for digest in (b"one", b"two"))
    ids = mark_embeds(None, 6, [(0, b"one"), (4, b"two")])
    assert ids is not None
    assert ids.tolist() == [one, 0, 0, 0, two, 0]
    beside = mark_embeds(mark_media(6, [MediaSpan("cat", 4, 1)]), 6, [(4, b"two")])
    assert beside is not None
    assert beside.tolist() == [0, 0, 0, 0, (media_extra_id("cat") + two) % 2**64 or 1, 0]


@pytest.mark.parametrize("offset", [-1, 6])
def test_an_item_outside_the_prompt_is_refused(offset):
    with pytest.raises(ValueError, match=f"begins at token {offset} of a prompt of 6"):
        mark_media(6, [MediaSpan("cat", offset, 1)])


@given(spans)
def test_order_means_nothing_and_every_place_is_marked(media):
    ids = mark_media(10, media)
    assert ids == mark_media(10, reversed(media))
    marked = {at for at, value in enumerate(ids or ()) if value}
    assert marked == {span.offset for span in media}


def test_two_items_at_one_place_differ_from_each_of_them():
    both = mark_media(1, [MediaSpan("cat", 0, 1), MediaSpan("dog", 0, 1)])
    assert both not in [mark_media(1, [MediaSpan(name, 0, 1)]) for name in ("cat", "dog")]
