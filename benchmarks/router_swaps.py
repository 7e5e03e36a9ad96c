"""Conversations over the models of a llama-server in router mode that holds one model at a time.

Each model has the same number of conversations. All of them take a turn, one after the other, by model: at
each turn the router ends the model of the turn before. Straight, and through kvpin, which saves the slots
before that.

    python benchmarks/router_swaps.py [--model tiny|large] [--models 3] [--conversations 30] [--turns 4]
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from harness import ROOT, host_cache, kvpin, llama_router
from slots import VOCABULARY, Answer, ask

sys.path.insert(0, str(ROOT))
from scripts.make_gguf import gguf_path

SLOTS, CTX = 2, 4096
WORDS, MORE_WORDS = 350, 40


@contextmanager
def router(kind: str, models: int) -> Iterator[tuple[str, Path]]:
    """A router of some models, and the directory where it saves slots."""
    with tempfile.TemporaryDirectory() as path, host_cache() as saved:
        for seed in range(models):
            shutil.copy(gguf_path(kind, seed), Path(path, f"m{seed}.gguf"))
        flags = ("--models-max", "1", "--cache-ram", "0", "-np", str(SLOTS), "-c", str(SLOTS * CTX))
        with llama_router(Path(path), *flags, save_dir=saved) as url:
            yield url, saved


def converse(url: str, models: int, conversations: int, turns: int) -> list[Answer]:
    """The answers of all turns but the first ones."""
    dice, answers = random.Random(7), list[Answer]()  # noqa: S311 - the same conversations each time
    words = lambda count: " ".join(dice.choices(VOCABULARY, k=count))  # noqa: E731 - short
    talks = [[{"role": "user", "content": words(WORDS)}] for _ in range(conversations)]
    limits = httpx.Limits(max_keepalive_connections=0)  # the server closes after each stream
    with httpx.Client(base_url=url, timeout=600, limits=limits) as client:
        for turn in range(turns):
            for number, messages in enumerate(talks):
                answer = ask(client, messages, {"model": f"m{number % models}"})
                answers += [answer] if turn else []
                messages += [
                    {"role": "assistant", "content": answer.text},
                    {"role": "user", "content": words(MORE_WORDS)},
                ]
    return answers


def report(name: str, answers: list[Answer]) -> None:
    """Prints what was reused."""
    cached, total = sum(each.cached for each in answers), sum(each.tokens for each in answers)
    hits = sum(each.cached > 0 for each in answers)
    told = [each for each in answers if each.predicted is not None]
    exact = sum(each.predicted == each.cached for each in told)
    first_ms = 1000 * statistics.median(each.ttft_s for each in answers)
    print(
        f"{name:9} {hits} of {len(answers)} turns reuse, {cached} of {total} tokens; first token "
        f"{first_ms:.0f} ms" + (f"; {exact} of {len(told)} predictions exact" if told else "")
    )


def main() -> None:
    """Prints both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("tiny", "large"), default="tiny")
    parser.add_argument("--models", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=30)
    parser.add_argument("--turns", type=int, default=4)
    given = parser.parse_args()
    shape = given.models, given.conversations, given.turns
    with router(given.model, given.models) as (url, _):
        report("straight", converse(url, *shape))
    with router(given.model, given.models) as (url, saved):
        engine = f"llama_server={url},host_cache_dir={saved}"
        with kvpin("--engine", engine) as proxy:
            report("kvpin", converse(proxy, *shape))


if __name__ == "__main__":
    main()
