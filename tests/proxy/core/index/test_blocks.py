from array import array
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from proxy.core.index.blocks import chain, extend, namespace_root, reusable_tokens

ROOT = namespace_root("m")
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def ids(values):
    return array("i", values)


def extras(values):
    return array("Q", values)


def test_kinds_never_collide_by_being_the_same_string_or_by_a_cut_elsewhere():
    parts = [None, "", "x", "xx", "model", "salt"]
    models = ("", "x", "xsaltx", "x\x04" + "\0" * 7 + "saltx", "model", "salt")
    given = [*product(models, parts, parts)]
    assert len({namespace_root(model, lora=lora, salt=salt) for model, lora, salt in given}) == len(given)


class TestChain:
    def test_hashes_are_what_the_design_says(self):
        tokens = ids([1, 2, 3, 4])
        first = xxh3_64_intdigest(ids([1, 2]).tobytes(), ROOT)
        second = xxh3_64_intdigest(ids([3, 4]).tobytes(), first)
        assert chain(ROOT, tokens, None, 2).hashes == (first, second)
        extra = extras([0, 7, 0, 0])
        marked = xxh3_64_intdigest(ids([1, 2]).tobytes() + extras([0, 7]).tobytes(), ROOT)
        assert chain(ROOT, tokens, extra, 2).hashes[0] == marked

    @given(TOKENS)
    def test_zeros_hash_as_no_extra_ids(self, tokens):
        zeros = extras([0] * len(tokens))
        assert extend(ROOT, ids(tokens), zeros, 4) == extend(ROOT, ids(tokens), None, 4)

    @given(TOKENS, TOKENS, st.integers(1, 8))
    def test_equal_hashes_mean_equal_prefixes(self, a, b, size):
        chain_a, chain_b = (extend(ROOT, ids(x), None, size) for x in (a, b))
        for at, (hash_a, hash_b) in enumerate(zip(chain_a, chain_b, strict=False)):
            assert (hash_a == hash_b) is (a[: (at + 1) * size] == b[: (at + 1) * size])

    @given(TOKENS, st.integers(0, 10))
    def test_extending_in_two_steps_is_extending_in_one(self, tokens, blocks):
        extra = extras([i % 3 for i in range(len(tokens))])
        cut = min(blocks * 4, len(tokens) // 4 * 4)
        head = extend(ROOT, ids(tokens[:cut]), extra[:cut], 4)
        rest = extend(head[-1] if head else ROOT, ids(tokens[cut:]), extra[cut:], 4)
        assert head + rest == extend(ROOT, ids(tokens), extra, 4)


@pytest.mark.parametrize(
    ("n_tokens", "size", "reusable"),
    [(0, 16, 0), (1, 16, 0), (16, 16, 0), (17, 16, 16), (32, 16, 16), (33, 16, 32), (5, 1, 4)],
)
def test_the_last_prompt_token_is_never_reusable(n_tokens, size, reusable):
    assert reusable_tokens(n_tokens, size) == reusable


@given(TOKENS, st.integers(1, 5), st.integers(0, 40), st.booleans())
def test_a_chain_continues_from_known_blocks(values, tokens_per_block, n_known, has_extras):
    tokens = ids(values)
    extra = extras([value % 3 for value in values]) if has_extras else None
    whole = chain(ROOT, tokens, extra, tokens_per_block)
    assert chain(ROOT, tokens, extra, tokens_per_block, whole.hashes[:n_known]) == whole
