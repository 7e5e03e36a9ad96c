"""Dicts that grow in small steps."""

from collections import Counter

import pytest
from xxhash import xxh3_64_intdigest

from proxy.core.index.spread import FULL, KEY_SHIFT, few, halve, place, spread

DIGESTS = [xxh3_64_intdigest(n.to_bytes(4, "big")) for n in range(25_600)]
KEYS = {
    "uint64": DIGESTS,
    "int64": [digest - 2**63 for digest in DIGESTS],
    "bytes": [digest.to_bytes(32, "big") for digest in DIGESTS],
}


@pytest.mark.parametrize("kind", KEYS)
def test_each_gets_its_share(kind):
    places = Counter(map(place, KEYS[kind]))
    assert set(places) == set(range(len(spread())))
    assert max(places.values()) < 200


def test_hashes_of_64_bits_are_spread_by_themselves():
    places = Counter(digest >> KEY_SHIFT for digest in [*DIGESTS, 0, 2**64 - 1])
    assert set(places) == set(range(len(spread())))
    assert max(places.values()) < 200


def test_small_numbers_have_a_place_too():
    assert {place(n) for n in range(-5, 1000)} <= set(range(len(spread())))


def test_there_are_as_many_as_bits_tell_apart():
    assert (len(spread()), len(spread(12))) == (256, 4096)


def dicts(parts):
    return list({id(part): part for part in parts}.values())


def test_dicts_are_halved_as_they_fill():
    parts = few(8)
    assert (len(parts), len(dicts(parts))) == (256, 16)
    for n, key in enumerate(DIGESTS):
        part = parts[key >> KEY_SHIFT]
        part[key] = n
        if len(part) > FULL // 8:
            halve(parts, key >> KEY_SHIFT)
    assert all(parts[key >> KEY_SHIFT][key] == n for n, key in enumerate(DIGESTS))
    assert sum(map(len, dicts(parts))) == len(DIGESTS)
    assert max(map(len, dicts(parts))) <= FULL // 8 + 1
    assert len(DIGESTS) // (FULL // 8) < len(dicts(parts)) <= 256


def test_a_dict_with_one_place_stays_whole():
    parts = few(4)
    parts[7][7 << 60] = 7
    before = dicts(parts)
    halve(parts, 7)
    assert all(a is b for a, b in zip(parts, before, strict=True))
