"""Prompts that lose their beginning, as those of an editor do that sends its latest excerpts.

With `cache_reuse`, the rest is reused at its new place, as predicted. Without, answers are those of a server
alone.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from statistics import median

import httpx
import pytest

from scripts.make_gguf import gguf_path
from tests.live.llama_world import WAIT_S, LlamaWorld, llama_world
from tests.llama import running_llama_server

pytestmark = pytest.mark.live

# With figures: MOVED_MODEL=large pytest -s tests/live/test_llama_moved.py -k document
MODEL = os.environ.get("MOVED_MODEL", "tiny")
TURNS, PARTS, CHUNK = 24 if MODEL == "tiny" else 10, 8, 32
# The tiny model has no tokens to fill in with.
FIM = [f"tokenizer.ggml.fim_{part}_token_id=int:{10 + at}" for at, part in enumerate(("pre", "suf", "mid"))]
FILLS_IN = tuple(word for each in FIM for word in ("--override-kv", each))


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


def body_of(document: list[str]) -> dict[str, object]:
    prompt = "You read what follows.\n" + "".join(document)
    return {"prompt": prompt, "max_tokens": 12, "temperature": 0}


def asked(world: LlamaWorld, document: list[str]) -> tuple[str, int, int, int, bool, float]:
    """(answer, predicted, cached, prompt tokens, whether it says that it is not exact, ms of the prompt)."""
    answer = world.post("completions", body_of(document)).raise_for_status()
    body = answer.json()
    usage = body["usage"]
    return (
        body["choices"][0]["text"],
        int(answer.headers["x-kvpin-predicted-tokens"]),
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["prompt_tokens"],
        answer.headers.get("x-kvpin-note", "").startswith("not exact"),
        body["timings"]["prompt_ms"],
    )


def asked_alone(url: str, document: list[str]) -> str:
    """The answer of a server that reuses nothing."""
    body = {**body_of(document), "cache_prompt": False}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S, trust_env=False)
    text: str = answer.raise_for_status().json()["choices"][0]["text"]
    return text


@pytest.mark.timeout(120 if MODEL == "tiny" else 1800)
@pytest.mark.parametrize("moves", [True, False])
def test_a_document_that_loses_its_beginning(tmp_path, moves):
    option = f"cache_reuse={CHUNK}" if moves else ""
    flag = ("--cache-reuse", str(CHUNK))  # without effect
    with (
        llama_world(tmp_path, *flag, slots=2, model=gguf_path(MODEL), engine_options=option) as world,
        running_llama_server(tmp_path / "bare.log", gguf_path(MODEL), slots=1) as bare,
    ):
        told = [asked(world, document) for document in documents(1)]
        exact = [] if moves else [asked_alone(bare.url, document) for document in documents(1)]
        findings = world.engine()["findings"]
    texts, predicted, cached, tokens, notes, prompt_ms = zip(*told, strict=True)
    print(  # noqa: T201 - the figures, for `pytest -s`
        f"{MODEL}, {option or 'exact'}: {sum(cached)} of {sum(tokens)} prompt tokens reused, "
        f"{median(prompt_ms[1:]):.0f} ms for a prompt"
    )
    assert predicted == cached
    if moves:
        assert sum(cached) > 0.6 * sum(tokens)
        assert notes == (False, *[True] * (TURNS - 1))
        assert ["moves KV" in str(finding) for finding in findings] == [True]
    else:
        assert list(texts) == exact
        assert sum(cached) < 0.05 * sum(tokens)
        assert not any(notes)


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
