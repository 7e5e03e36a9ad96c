"""A flush of a real llama-server that has a prompt cache of its own: it says what it cannot reach."""

from __future__ import annotations

import pytest

from tests.live.llama_world import llama_world

pytestmark = pytest.mark.live

TALKS = ("river", "stone", "cloud", "grass")


def begun(text: str) -> str:
    return " ".join(f"{text} {number}" for number in range(60))


@pytest.mark.parametrize("cache_ram", [0, 512])
def test_a_flush_says_what_the_servers_own_cache_may_keep(tmp_path, cache_ram):
    with llama_world(tmp_path, "--cache-ram", str(cache_ram), slots=2, ctx=2048) as world:
        for text in TALKS:
            world.chat(begun(text))
        (flushed,) = world.admin("flush", {"all": True})["engines"]
        world.until_idle()
        seen = [world.chat(begun(text)) for text in TALKS]
        predicted = sum(int(answer.headers["x-kvpin-predicted-tokens"]) for answer in seen)
        cached = sum(a.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for a in seen)
        records = [world.record_of(answer) for answer in seen]
        print(f"--cache-ram {cache_ram}: flushed {flushed}; then {predicted} predicted, {cached} reported")  # noqa: T201 - the figures, for `pytest -s`
        assert len(records) == len(TALKS)
        if cache_ram:
            assert cached > predicted
            assert flushed["left"]["server_cache"] > 0
        else:
            assert flushed["left"] == {}
            assert cached == predicted
