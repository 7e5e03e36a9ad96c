from __future__ import annotations

import base64
import pickle
import struct
from array import array
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from engine_adapter.errors import PromptTableError
from engine_adapter.prompt import extra_ids
from engine_adapter.prompt.chat import ChatPrompt
from engine_adapter.prompt.extra_ids import (
    UINT64_MAX,
    TableRef,
    client_extra_id,
    extra_id,
    mark_media,
    media_extra_id,
    parse_embeddings,
    prompt_embeds_extra_id,
    prompt_table_extra_id,
    read_embeds,
    reading_ms,
    resolve_extra_ids,
    tokens_of,
)
from engine_adapter.types import MediaSpan

VOCAB, HIDDEN = 100, 4
A, B, TOP = TableRef(extra_id=11, rows=4), TableRef(extra_id=22, rows=8), TableRef(UINT64_MAX, 1)


def tensors(**arrays):
    return save(arrays)


def embeddings(values, dtype=np.float32):
    return parse_embeddings(tensors(t=np.asarray(values, dtype=dtype)), param="p")


def resolve(tokens, *, explicit=None, table=None):
    known = {ref.extra_id: ref for ref in (A, B, TOP)}
    return resolve_extra_ids(
        array("i", tokens), vocab_size=VOCAB, explicit=explicit, table=table, registered=known
    )


class Zero:
    def update(self, part):
        pass

    def digest(self):
        return bytes(8)


class TestIdentity:
    def test_kinds_and_contents_are_told_apart(self):
        pairs = [("a", b"bc"), ("ab", b"c"), ("abc", b""), ("", b"abc")]
        assert len({extra_id(*pair) for pair in pairs}) == len(pairs)

    def test_0_is_given_to_text_alone(self, monkeypatch):
        monkeypatch.setattr(extra_ids, "blake2b", lambda _frame, digest_size: Zero())
        assert extra_id("a", b"b") == 1

    def test_an_id_stays_what_it_was(self):
        # They are in files, in KV and in the tables of engines.
        framed = b"\x01" + bytes(7) + b"a" + b"\x02" + bytes(7) + b"bc"
        digest = int.from_bytes(blake2b(framed, digest_size=8).digest(), "little")
        assert extra_id("a", b"bc") == extra_id("a", b"b", b"c") == digest
        assert prompt_table_extra_id(embeddings([[1.0, 2.0], [3.0, 4.0]])) == 18393934817007223142
        assert embeddings([[1.0, 2.0], [3.0, 4.0]]).content().hex() == "ff5ce8d9ce48e8db69f1205c796488e6"

    def test_equal_embeddings_and_no_others_have_one_id_whatever_their_tensors_name(self):
        values = np.ones((2, 4), np.float32)
        one, two = (parse_embeddings(tensors(**{name: values}), param="p") for name in ("x", "y"))
        assert prompt_table_extra_id(one) == prompt_table_extra_id(two)
        others = [embeddings(values.T), embeddings(values, np.float16), embeddings(2 * values)]
        ids = {prompt_table_extra_id(each) for each in (one, *others)}
        assert len({*ids, *map(prompt_embeds_extra_id, (one, *others))}) == 8

    def test_a_clients_label_never_joins_two_tables(self):
        assert client_extra_id(11, 5) != client_extra_id(22, 5) != client_extra_id(22, 6)


class TestParseEmbeddings:
    def test_reads_rows_columns_type_and_bytes(self):
        values = np.arange(6, dtype=np.float32).reshape(2, 3)
        result = embeddings(values)
        assert (result.rows, result.hidden, result.dtype) == (2, 3, "F32")
        assert result.values == values.tobytes()

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (b"PK\x03\x04rest", "pickle"),
            (b"", "not safetensors"),
            (struct.pack("<Q", 2**60) + b"{}", "not safetensors"),
            (save({}), "holds 0 tensors"),
            (tensors(a=np.ones((1, 1), np.float32), b=np.ones((1, 1), np.float32)), "holds 2 tensors"),
            (tensors(a=np.ones(4, np.float32)), r"shape \[4\]"),
            (tensors(a=np.ones((0, 3), np.float32)), r"shape \[0, 3\]"),
            (tensors(a=np.ones((2, 2), np.int32)), "type I32"),
        ],
    )
    def test_refuses_with_the_field_and_the_reason(self, data, reason):
        with pytest.raises(PromptTableError, match=reason) as caught:
            parse_embeddings(data, param="messages[0].content[1]")
        assert caught.value.param == "messages[0].content[1]"
        assert str(caught.value).startswith("messages[0].content[1]")


class TestResolve:
    @pytest.mark.parametrize(
        ("tokens", "options", "extra_ids", "tables"),
        [
            ([1, 2, 99], {}, None, {}),
            ([], {"explicit": []}, None, {}),
            ([1, 2], {"explicit": [0, 0], "table": A}, None, {}),
            # A named table stands behind every fake id, and is mixed into the client's labels.
            ([1, 103, 100, 2], {"table": A}, [0, 11, 11, 0], {11: A}),
            (
                [100, 101],
                {"table": A, "explicit": [5, 11]},
                [client_extra_id(11, 5), 11],
                {client_extra_id(11, 5): A, 11: A},
            ),
            ([100, 1, 107], {"explicit": [11, 0, 22]}, [11, 0, 22], {11: A, 22: B}),
            ([100], {"explicit": [UINT64_MAX]}, [UINT64_MAX], {UINT64_MAX: TOP}),
        ],
    )
    def test_fake_ids_have_tables(self, tokens, options, extra_ids, tables):
        result = resolve(tokens, **options)
        assert (result.extra_ids and list(result.extra_ids), result.tables) == (extra_ids, tables)

    @pytest.mark.parametrize(
        ("tokens", "options", "param", "reason"),
        [
            ([1, 2], {"explicit": [0]}, "extra_ids", "1 entries for 2 prompt tokens"),
            ([1, 100], {"explicit": [0, 0]}, "extra_ids[1]", "0 beside the fake id 100"),
            ([1, 2], {"explicit": [0, 7]}, "extra_ids[1]", "7 beside the text id 2"),
            ([100], {"explicit": [2**64]}, "extra_ids[0]", "0 to 2**64-1"),
            ([100], {"explicit": [True]}, "extra_ids[0]", "True"),
            ([100], {"explicit": ["11"]}, "extra_ids[0]", "'11'"),
            ([1, -1], {}, "prompt[1]", "negative"),
            ([1, 100], {}, "prompt[1]", "prompt[1] is 100, outside the vocabulary of 100"),
            ([1, 100], {"explicit": [0, 33]}, "extra_ids[1]", "no prompt table"),
            ([100, 104], {"table": A}, "prompt[1]", "row 4 of a table of 4 rows"),
        ],
    )
    def test_a_broken_rule_names_its_index(self, tokens, options, param, reason):
        with pytest.raises(PromptTableError) as caught:
            resolve(tokens, **options)
        assert caught.value.param == param
        assert reason in str(caught.value)
        assert str(caught.value).startswith(param)

    @given(st.lists(st.integers(0, 107), max_size=30))
    def test_zero_stands_beside_text_and_only_there(self, tokens):
        result = resolve(tokens, table=B)
        extra = result.extra_ids or [0] * len(tokens)
        assert [value == 0 for value in extra] == [token < VOCAB for token in tokens]


def test_a_header_of_many_tensors_is_refused_before_it_is_decoded(monkeypatch):
    many = tensors(**{f"t{at}": np.zeros((1, 1), np.float32) for at in range(2000)})
    monkeypatch.setattr(extra_ids.safetensors, "deserialize", lambda _data: pytest.fail("decoded"))
    with pytest.raises(PromptTableError, match="p has a safetensors header of "):
        parse_embeddings(many, param="p")


def test_notes_in_a_header_are_taken():
    array = {"t": np.zeros((2, 3), np.float32)}
    data = save(array, metadata={"made by": "x" * 10_000})
    assert parse_embeddings(data, param="p").rows == 2


# --- media and embeddings -----------------------------------------------------------------------------------


spans = st.lists(st.builds(MediaSpan, st.text(), st.integers(0, 9), st.integers(1, 5)), max_size=6)


def test_items_and_embeddings_mark_the_token_they_begin_at_also_together():
    one, two = (extra_id("prompt_embeds_rows", digest) for digest in (b"one", b"two"))
    cat, dog = MediaSpan("cat", 2, 3), MediaSpan("dog", 5, 1)
    ids = mark_media(6, [cat, dog], [(0, b"one"), (2, b"two")])
    assert ids.tolist() == [one, 0, (media_extra_id("cat") + two) % 2**64, 0, 0, media_extra_id("dog")]


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
