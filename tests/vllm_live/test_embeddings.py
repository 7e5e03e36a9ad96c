"""Prompt embeddings in completions and chats on a real vLLM: what is predicted is what it reports."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
import torch

from scripts.make_checkpoint import checkpoint_path
from tests.vllm_live.vllm_world import BLOCK, VllmOptions, vllm_world

pytestmark = pytest.mark.live

HIDDEN = json.loads((Path(checkpoint_path("model")) / "config.json").read_text())["hidden_size"]
STORY = "The ship sailed on, past the isles of the north, and the crew sang. " * 8


@pytest.fixture(scope="module", params=[("--enable-scale-out",), ()], ids=["render", "tokenize"])
def world(request, tmp_path_factory):
    options = VllmOptions(flags=("--enable-prompt-embeds", *request.param))
    with vllm_world(tmp_path_factory.mktemp("vllm"), options) as world:
        yield world


def embeddings(rows, seed=1, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.randn(rows, HIDDEN).to(dtype)


def encoded(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


def part(tensor):
    return {"type": "prompt_embeds", "data": encoded(tensor)}


def text(words):
    return {"type": "text", "text": words}


@pytest.fixture
def ask(world):
    """The prompt's tokens, and the predicted and the reported reused ones."""

    def ask(path, **fields):
        answer = world.post(path, fields)
        usage = answer.json()["usage"]
        reported = usage["prompt_tokens_details"]["cached_tokens"]
        return usage["prompt_tokens"], int(answer.headers["x-kvpin-predicted-tokens"]), reported

    return ask


def test_completions(world, ask, tell):
    rows = embeddings(150)
    other = torch.cat([rows[:70], embeddings(80, seed=2)])
    cases = (
        ("nothing is held", {"prompt_embeds": encoded(rows)}, 0),
        ("the same again", {"prompt_embeds": encoded(rows)}, 4 * BLOCK),
        ("in a batch of one", {"prompt_embeds": encoded(rows[None])}, 4 * BLOCK),
        ("in a list", {"prompt_embeds": [encoded(rows)]}, 4 * BLOCK),
        ("a part of a larger tensor", {"prompt_embeds": encoded(rows[:70])}, 2 * BLOCK),
        ("other rows behind", {"prompt_embeds": encoded(other)}, 2 * BLOCK),
        ("other rows", {"prompt_embeds": encoded(embeddings(150, seed=3))}, 0),
        ("as many ids of 0", {"prompt": [0] * 150}, 0),
        ("another salt", {"prompt_embeds": encoded(rows), "cache_salt": "mine"}, 0),
        ("another salt again", {"prompt_embeds": encoded(rows), "cache_salt": "mine"}, 4 * BLOCK),
        ("as a stream of many tokens", {"prompt_embeds": encoded(rows), "max_tokens": 60}, 4 * BLOCK),
    )
    for case, fields, expected in cases:
        assert ask("completions", **fields)[1:] == (expected, expected), case
    tell(f"{len(cases)} of {len(cases)} exact")
    assert world.engine()["trust"] == "precise"


def test_several_prompts_in_one_completion(world):
    """Each is a request of its own, embeddings first, as vLLM itself orders them."""
    one, two = encoded(embeddings(100, seed=11)), encoded(embeddings(100, seed=12))
    alone = [{"prompt_embeds": one}, {"prompt_embeds": two}, {"prompt": STORY}]
    texts = [world.post("completions", fields).json()["choices"][0]["text"] for fields in alone]
    for beside in (STORY, [STORY]):
        answer = world.post("completions", {"prompt_embeds": [one, two], "prompt": beside}).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert [choice["text"] for choice in answer["choices"]] == texts
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 9 * BLOCK


def test_chats(world, ask, tell):
    picture, sound = embeddings(40, seed=5), embeddings(33, seed=6)
    seen = [text(STORY), part(picture), text("What is it?"), part(sound), part(sound[:7])]
    cases = (
        ("nothing is held", seen, False),
        ("the same again", seen, True),
        ("a next part", [*seen, text("Tell me more about the first one, and about the second. " * 3)], True),
        ("the other way round", [text(STORY), part(sound), text("What is it?"), part(picture)], True),
        ("other embeddings first", [part(sound), text(STORY)], False),
        ("the text alone", [text(STORY)], False),
    )
    for case, parts, hits in cases:
        n_tokens, predicted, reported = ask("chat/completions", messages=[{"role": "user", "content": parts}])
        assert (predicted, reported > 0) == (reported, hits), (case, n_tokens, predicted, reported)
    tell(f"{len(cases)} of {len(cases)} exact")
    assert world.engine()["trust"] == "precise"


def test_numbers_of_another_type_are_never_foreseen_in_vain(world, ask):
    """vLLM hashes them as its own type. What kvpin sent to it a moment ago is expected there all the same."""
    for _ in range(2):
        _, predicted, reported = ask("completions", prompt_embeds=encoded(embeddings(100, 9, torch.float16)))
        assert predicted in (0, reported)
    assert reported == 3 * BLOCK
    assert world.engine()["trust"] == "precise"
