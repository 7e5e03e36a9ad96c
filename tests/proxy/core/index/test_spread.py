"""Dicts that grow in small steps."""

from collections import Counter

import pytest
from xxhash import xxh3_64_intdigest

from proxy.core.index.segments import place, spread

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
