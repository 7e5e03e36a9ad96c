"""What kvpin predicts is what the server reuses, also of models whose memory cannot be cut at any token."""

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
SHAPES = ("tiny", "swa", "sinks", "linear", "conv") if REQUESTS else ("tiny", "linear")
# Without it, as clients that name no conversation: what slots hold is not known to be out of date.
NAMED = os.environ.get("CHECKPOINT_NAMED", "1") == "1"
FLAGS = os.environ.get("CHECKPOINT_FLAGS", "").split()
SLOTS, TALKS, AT_ONCE = 3, 8, 2
WORDS = [
    "river", "stone", "garden", "light", "paper", "winter", "market", "engine", "letter", "window", "silver",
    "basket",
]  # fmt: skip
SYSTEM = {"role": "system", "content": "You are brief. " * 12}


class Talk:
    """A conversation whose next request goes on, repeats the last one, or changes something earlier."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.messages: list[dict[str, Any]] = [SYSTEM]

    def next(self) -> list[dict[str, Any]]:
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
    dice = random.Random(7)  # noqa: S311 - the same requests each time
    talks = [Talk(dice) for _ in range(TALKS)]
    told: list[tuple[int, int, int]] = []
    with (
        llama_world(tmp_path, *FLAGS, slots=SLOTS, model=gguf_path(shape)) as world,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        while len(told) < (REQUESTS or 40):
            chosen = dice.sample(talks, AT_ONCE)
            asked = [talk.next() for talk in chosen]
            names = [{"prompt_cache_key": f"talk-{talks.index(talk)}"} if NAMED else {} for talk in chosen]
            answers = pool.map(lambda messages, name: world.chat(messages, **name), asked, names)
            for talk, answer in zip(chosen, answers, strict=True):
                body = answer.json()
                predicted = int(answer.headers["x-kvpin-predicted-tokens"])
                usage = body["usage"]
                told.append(
                    (predicted, usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"])
                )
                talk.messages = [*talk.messages, body["choices"][0]["message"]]
        restores = world.kv()["counts"]["restores"]
        findings = world.engine()["findings"]
    predicted, cached, total = (sum(column) for column in zip(*told, strict=True))
    wrong = [each for each in told if each[0] != each[1]]
    print(  # noqa: T201 - the figures, for `pytest -s`
        f"{shape} {' '.join(FLAGS)}: {len(told) - len(wrong)} of {len(told)} exact, {restores} restores, "
        f"{cached} of {total} prompt tokens reused, {predicted} predicted",
        *findings,
        *wrong[:20],
        sep="\n  ",
    )
    assert len(wrong) <= 0.01 * len(told)
    assert restores or shape not in ("tiny", "linear", "conv")
