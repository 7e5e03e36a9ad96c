"""Markers of images, audio and video."""

from __future__ import annotations

import base64
import pickle
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import save

from engine_adapter.errors import PromptTableError
from engine_adapter.prompt.chat import ChatPrompt
from engine_adapter.prompt.extra_ids import (
    extra_id,
    mark_media,
    media_extra_id,
    read_embeds,
    reading_ms,
    tokens_of,
)
from engine_adapter.types import MediaSpan

spans = st.lists(st.builds(MediaSpan, st.text(), st.integers(0, 9), st.integers(1, 5)), max_size=6)


def test_an_item_marks_the_token_it_begins_at():
    ids = mark_media(6, [MediaSpan("cat", 2, 3), MediaSpan("dog", 5, 1)])
    assert ids is not None
    assert ids.tolist() == [0, 0, media_extra_id("cat"), 0, 0, media_extra_id("dog")]


def test_embeddings_mark_their_blocks_also_beside_an_item():
    one, two = (extra_id("prompt_embeds_rows", digest) for digest in (b"one", b"two"))
    ids = mark_media(6, [MediaSpan("cat", 4, 1)], [(0, b"one"), (4, b"two")])
    assert ids is not None
    assert ids.tolist() == [one, 0, 0, 0, (media_extra_id("cat") + two) % 2**64, 0]


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


VOCAB, HIDDEN = 100, 4


def encoded(data):
    return base64.b64encode(data).decode()


def embeds(values):
    return encoded(save({"t": np.asarray(values)}))


def read(data, param="prompt_embeds"):
    return read_embeds(data, param=param, hidden_size=HIDDEN)


def test_a_row_is_a_fake_id_and_all_have_the_identity_of_the_tensor():
    rows = read(embeds(np.ones((3, HIDDEN), np.float32)))
    token_ids, extra_ids = tokens_of(rows, VOCAB)
    assert token_ids == array("i", [100, 101, 102])
    assert len(set(extra_ids)) == 1
    assert extra_ids[0] > 0
    made = ChatPrompt.of_embeddings(rows, VOCAB)
    assert (made.token_ids, made.extra_ids, made.embeddings) == (token_ids, extra_ids, {extra_ids[0]: rows})


_SHAPES = st.tuples(st.integers(1, 3), st.just(HIDDEN))
_TENSORS = st.sampled_from([np.float16, np.float32, np.float64]).flatmap(
    lambda dtype: arrays(dtype, _SHAPES, elements=st.sampled_from([0, 1]))
)


@given(_TENSORS, _TENSORS)
def test_two_tensors_share_an_identity_only_if_they_are_the_same(one, two):
    same = one.dtype == two.dtype and one.tobytes() == two.tobytes()
    (_, first), (_, second) = (tokens_of(read(embeds(each)), VOCAB) for each in (one, two))
    assert (first[0] == second[0]) is same


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "must be base64 text"),
        ("no base64!", "is not base64"),
        ("", "is not safetensors"),
        (encoded(pickle.dumps([1.0])), "pickled.*safetensors"),
        (embeds(np.ones((2, 5), np.float32)), "5 columns; the model's hidden size is 4"),
    ],
)
def test_what_cannot_be_read_names_the_field(data, reason):
    with pytest.raises(PromptTableError, match=reason) as caught:
        read(data, "messages[0].content[1].data")
    assert caught.value.param == "messages[0].content[1].data"
    assert str(caught.value).startswith("messages[0].content[1].data")


def test_only_a_long_text_takes_long_to_read():
    assert reading_ms(None) == 0
    assert reading_ms("AAAA") < 1 < reading_ms("A" * (1 << 20))
