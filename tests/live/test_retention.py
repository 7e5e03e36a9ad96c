"""Retention on a real engine behind the proxy: what clients ask for is kept, up to a share."""

from __future__ import annotations

import pytest

from tests.live.conftest import running_kvpin
from tests.live.test_cache import ask, cached, document

pytestmark = pytest.mark.live

ENTRIES, PROMPT_BLOCKS = 18, 9  # of a document


@pytest.fixture(scope="module")
def kvpin(tmp_path_factory):
    log = tmp_path_factory.mktemp("kvpin") / "log"
    engine = "embedded: --threads 1 --kv-blocks 64 --host-cache-bytes 4MiB"
    with running_kvpin(log, "--managed", engine) as proxy:
        yield proxy


def kv_of(kvpin):
    (engine,) = kvpin.engines().values()
    return engine["kv"]


def scan(kvpin, name):
    """Asks about more documents than both tiers hold, each once."""
    kv = kv_of(kvpin)
    for number in range((kv["gpu"]["total"] + kv["host"]["total"]) // PROMPT_BLOCKS + 1):
        ask(kvpin, document(f"{name} {number}", ENTRIES), max_tokens=1)


def test_what_is_to_be_kept_outlives_a_scan_and_its_equal_does_not(kvpin):
    told = ask(kvpin, document("kept", ENTRIES), prompt_cache_retention="24h")
    assert told.headers["x-kvpin-retention"] == "86400"
    details = told.json()["usage"]["prompt_tokens_details"]
    assert details["cache_write_tokens"] >= 16 * (PROMPT_BLOCKS - 1)
    ask(kvpin, document("left", ENTRIES))
    assert kv_of(kvpin)["kept_blocks"] >= PROMPT_BLOCKS
    scan(kvpin, "scan")
    kept, left = ask(kvpin, document("kept", ENTRIES)), ask(kvpin, document("left", ENTRIES))
    assert cached(kept) >= 16 * (PROMPT_BLOCKS - 1)
    assert cached(left) < cached(kept) / 2  # only the beginning that all prompts share


def test_no_more_than_its_share_is_kept_and_the_oldest_goes(kvpin):
    room = kv_of(kvpin)["host"]["total"]
    asks = room // PROMPT_BLOCKS + 1
    for number in range(asks):
        ask(kvpin, document(f"greedy {number}", ENTRIES), prompt_cache_options={"ttl": "30m"})
    assert kv_of(kvpin)["kept_blocks"] == room // 2
    scan(kvpin, "another scan")
    first, last = (cached(ask(kvpin, document(f"greedy {n}", ENTRIES))) for n in (0, asks - 1))
    assert last >= 16 * (PROMPT_BLOCKS - 1)
    assert first < last / 2
