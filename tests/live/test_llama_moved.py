"""Texts to fill in beside excerpts that change, as an editor sends them.

With `cache_reuse`, what is left of the excerpts is reused at its new place. That moved KV is predicted, and
else never used: test_requests.py and test_checkpoints.py of the adapter.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import httpx
import pytest

from tests.live.llama_world import FILLS_IN, WAIT_S, llama_world

pytestmark = pytest.mark.live

TURNS, PARTS, CHUNK = 24, 8, 32


def documents(seed: int) -> Iterator[list[str]]:
    """The parts of a document in each turn: the oldest goes, sometimes also another, and new ones come."""
    dice = random.Random(seed)  # noqa: S311 - the same documents each time

    def part() -> str:
        words = ("".join(dice.choices("aeinorst", k=5)) for _ in range(dice.choice((20, 40, 60))))
        return " ".join(words) + ".\n"

    parts = [part() for _ in range(PARTS)]
    for turn in range(TURNS):
        yield list(parts)
        del parts[0]
        if turn % 3 == 1:
            del parts[dice.randrange(len(parts))]
        while len(parts) < PARTS:
            parts.append(part())


@pytest.mark.parametrize(("slots", "moves"), [(1, True), (1, False), (3, True)])
def test_excerpts_beside_a_text_that_is_filled_in(tmp_path, slots, moves):
    """As llama.vim sends them in `input_extra`. Of two editors, each has a slot of its own."""
    option = f"cache_reuse={CHUNK}" if moves else ""
    editors = [documents(seed) for seed in range(1 if slots == 1 else 2)]
    cached = tokens = 0
    with llama_world(tmp_path, *FILLS_IN, slots=slots, engine_options=option) as world:
        path = f"{world.base_url.removesuffix('/v1')}/infill"
        for turn in range(TURNS):
            for editor in editors:
                extra = [{"filename": "a.py", "text": text} for text in next(editor)]
                text = {"input_prefix": f"def f{turn}(", "input_suffix": "):", "n_predict": 4}
                answer = httpx.post(
                    path, json={**text, "input_extra": extra}, timeout=WAIT_S, trust_env=False
                )
                times = answer.raise_for_status().json()["timings"]
                if turn:
                    cached, tokens = cached + times["cache_n"], tokens + times["cache_n"] + times["prompt_n"]
                    assert answer.headers.get("x-kvpin-note", "").startswith("not exact") == moves
    assert cached > 0.6 * tokens if moves else cached < 0.1 * tokens
