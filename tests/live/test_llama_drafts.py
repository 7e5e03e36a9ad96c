"""A real llama-server with a draft model: kvpin leaves the draft its context."""

from __future__ import annotations

import pytest

from scripts.make_gguf import gguf_path
from tests.live.llama_world import LlamaWorld, llama_world

pytestmark = pytest.mark.live

TALKS = ("river", "stone", "cloud", "grass", "light")  # one more than slots
TURNS = 4
ANSWER = 24  # tokens


def begun(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": " ".join(f"{text} {number}" for number in range(60))}]


def talk(world: LlamaWorld) -> tuple[int, int]:
    """Talks in turn, more than there are slots. Returns how many tokens the draft proposed after the first
    turn, and how many were accepted."""
    talks = {text: begun(text) for text in TALKS}
    proposed = accepted = 0
    for turn in range(TURNS):
        for messages in talks.values():
            answer = world.chat(messages, max_tokens=ANSWER, seed=1).json()
            messages += [answer["choices"][0]["message"], {"role": "user", "content": f"go on {turn}"}]
            if turn:
                proposed += answer["timings"].get("draft_n", 0)
                accepted += answer["timings"].get("draft_n_accepted", 0)
        world.until_idle()
    return proposed, accepted


@pytest.mark.parametrize("drafts", [True, False], ids=["draft model", "n-grams"])
def test_a_draft_model_keeps_its_context(tmp_path, drafts):
    """The draft is the model itself: with its context, all that it proposes is accepted."""
    draft = ("--spec-type", "draft-simple", "-md", str(gguf_path("tiny")))
    flags = draft if drafts else ("--spec-type", "ngram-simple")
    with llama_world(tmp_path, *flags, slots=4, ctx=2048) as world:
        proposed, accepted = talk(world)
        counts, findings = world.kv()["counts"], world.engine()["findings"]
        print(f"{accepted} of {proposed} accepted, {counts['saves']} saves, {counts['restores']} restores")  # noqa: T201 - the figures, for `pytest -s`
        assert any("draft model" in finding for finding in findings) == drafts, findings
        if not drafts:
            assert counts["restores"] > 0
            return
        assert proposed > 100
        assert accepted / proposed > 0.9
        assert counts["saves"] == counts["restores"] == 0
        refused = world.kvpin.admin("POST", "offload", json={"all": True}).json()
        assert "--model-draft" in str(refused), refused
