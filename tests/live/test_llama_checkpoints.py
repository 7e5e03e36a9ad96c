"""Models whose memory cannot be cut at any token: what kvpin predicts is what the server reuses."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from scripts.make_gguf import gguf_path
from tests.live.llama_world import llama_world

pytestmark = pytest.mark.live

# All shapes in full by hand: CHECKPOINT_REQUESTS=300 pytest -s tests/live/test_llama_checkpoints.py
REQUESTS = int(os.environ.get("CHECKPOINT_REQUESTS", "0"))
SHAPES = ("swa", "sinks", "linear", "conv") if REQUESTS else ("linear",)
FLAGS = os.environ.get("CHECKPOINT_FLAGS", "").split()
SLOTS, TALKS, AT_ONCE = 3, 8, 2
WORDS = "river stone garden light paper winter market engine letter window silver basket".split()
SYSTEM = {"role": "system", "content": "You are brief. " * 12}


class Talk:
    """A conversation whose next request goes on, repeats the last one, or changes something earlier."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.messages: list[dict[str, Any]] = [SYSTEM]

    def next(self) -> list[dict[str, Any]]:
        """The messages of its next request."""
        users = [at for at, message in enumerate(self.messages) if message["role"] == "user"]
        chance = self.dice.random()
        if users and chance < 0.1:
            self.messages = self.messages[: users[-1] + 1]  # regenerate
        elif users and chance < 0.3:
            changed = users[-1] if chance < 0.2 else self.dice.choice(users)
            self.messages = [*self.messages[:changed], self.said()]
        elif len(self.messages) > 12:
            self.messages = [SYSTEM, self.said()]
        else:
            self.messages.append(self.said())
        return self.messages

    def said(self) -> dict[str, Any]:
        words = self.dice.choices(WORDS, k=self.dice.choice((5, 20, 60, 250)))
        return {"role": "user", "content": " ".join(words)}


@pytest.mark.timeout(1800 if REQUESTS else 120)
@pytest.mark.parametrize("shape", SHAPES)
def test_predictions_are_exact_on_more_conversations_than_slots(tmp_path, shape):
    dice = random.Random(7)
    talks = [Talk(dice) for _ in range(TALKS)]
    told: list[tuple[int, int, int]] = []
    with (
        llama_world(tmp_path, *FLAGS, slots=SLOTS, model=gguf_path(shape)) as world,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        while len(told) < (REQUESTS or 40):
            chosen = dice.sample(talks, AT_ONCE)
            answers = pool.map(lambda talk: world.chat(talk.messages), (chosen, [t.next() for t in chosen])[0])
            for talk, answer in zip(chosen, answers, strict=True):
                body = answer.json()
                usage = body["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                told.append((int(answer.headers["x-kvpin-predicted-tokens"]), cached, usage["prompt_tokens"]))
                talk.messages = [*talk.messages, body["choices"][0]["message"]]
        counts = world.kv()["counts"]
        findings = world.engine()["findings"]
    right = sum(predicted == cached for predicted, cached, _ in told)
    reused, total = sum(cached for _, cached, _ in told), sum(prompt for *_, prompt in told)
    print(
        f"{shape} {' '.join(FLAGS)}: {right} of {len(told)} predictions are exact, {counts['restores']} restores, "
        f"{reused} of {total} prompt tokens reused"
    )
    print(findings, [each for each in told if each[0] != each[1]][:30])
    assert right >= 0.99 * len(told)
