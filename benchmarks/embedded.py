"""The embedded engine beside llama-server and transformers' own continuous batching.

All run the same weights on as many threads: a Llama of 94M random float32 weights, made once. llama-server
reads them as a GGUF in float32 and keeps KV in float32. The engines take turns. Each figure is the best of
all rounds, so that other work on the machine disturbs it less.

- tokens/s: N requests with different prompts of `--prompt` tokens decode together, greedily. Counted from the
  first token of the last request on, so that no prefill is in it.
- TTFT: seconds to the first token of a prompt that nothing has cached.
- same again: TTFT of an identical prompt ÷ the time between two tokens of its answer.
- restored: TTFT of a prompt whose KV lies in host memory ÷ that of a prompt that nothing has cached.

transformers needs `psutil` for it and is left out without.

    python benchmarks/embedded.py [--rounds 3] [--threads 1] [--streams 1,8,32] [--ttft 2000,8000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from harness import ROOT, engine, llama_server, made_model

sys.path.insert(0, str(ROOT))
from scripts.make_gguf import convert

CONTEXT = 16384
SIZES = (
    "--layers",
    "14",
    "--hidden",
    "768",
    "--heads",
    "12",
    "--kv-heads",
    "4",
    "--max-model-len",
    str(CONTEXT),
)
TEXT_IDS = range(300, 4000)
ANSWER_ID = 1000
"""The token of every answer. It is whole text: servers hold back half a character."""
SAME_AGAIN = 1000  # tokens

Figures = dict[str, float]
Side = Callable[[argparse.Namespace], Figures]
"""One round of all that an engine is asked for: name of the figure → value."""


def prompt(tokens: int) -> list[int]:
    """A prompt that no other shares a block with."""
    return random.choices(TEXT_IDS, k=tokens)  # noqa: S311


class Served:
    """An engine with OpenAI's routes."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, *prompts: list[int], tokens: int) -> list[list[float]]:
        """Asks for all prompts at once; returns the seconds at which each one's tokens came,
        but for the last."""
        return asyncio.run(self._ask(prompts, tokens))

    async def _ask(self, prompts: tuple[list[int], ...], tokens: int) -> list[list[float]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=3600, trust_env=False, limits=limits
        ) as client:
            return await asyncio.gather(*(self._stream(client, each, tokens) for each in prompts))

    async def _stream(self, client: httpx.AsyncClient, ids: list[int], tokens: int) -> list[float]:
        body: dict[str, Any] = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True, "cache_prompt": True, "logit_bias": {str(ANSWER_ID): 100}}
        began = time.perf_counter()
        async with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            return [
                time.perf_counter() - began
                async for line in response.aiter_lines()
                if line.startswith("data: {") and _is_token(json.loads(line[6:]))
            ]


def _is_token(event: dict[str, Any]) -> bool:
    """False for the last event of a stream: some servers send it after the last token, some with it."""
    return bool(event.get("choices")) and not event["choices"][0].get("finish_reason")


def rate(times: list[list[float]]) -> float:
    """Tokens/s from the moment when all decode to the moment when the first one ends."""
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    return sum(begin < at <= end for each in times for at in each) / (end - begin)


def speeds(many: Served, long: Served, options: argparse.Namespace) -> Figures:
    """Measures one server. `many` takes all streams at once, `long` the longest prompt."""
    figures: Figures = {}
    for streams in options.streams:
        prompts = [prompt(options.prompt) for _ in range(streams)]
        figures[f"{streams} streams, tokens/s"] = rate(many.ask(*prompts, tokens=options.tokens))
    for tokens in options.ttft:
        figures[f"TTFT, {tokens} tokens, s"] = long.ask(prompt(tokens), tokens=2)[0][0]
    same = prompt(SAME_AGAIN)
    long.ask(same, tokens=2)
    (times,) = long.ask(same, tokens=16)
    figures["same again"] = times[0] / statistics.median(after - before for before, after in pairwise(times))
    return figures


@contextmanager
def embedded(model: Path, options: argparse.Namespace) -> Iterator[Side]:
    """`kvpin engine`."""
    sizes = ("--threads", str(options.threads), "--kv-blocks", "3072", "--host-cache-bytes", str(1 << 29))
    with engine("--model", str(model), *sizes) as url:
        served = Served(url)

        def measure(options: argparse.Namespace) -> Figures:
            figures = speeds(served, served, options)
            ids = prompt(min(options.ttft))
            cold = served.ask(ids, tokens=2)[0][0]
            while httpx.post(f"{url}/kv/offload", json={"token_ids": ids}, timeout=60).json()["remaining"]:
                pass
            figures["restored"] = served.ask(ids, tokens=2)[0][0] / cold
            return figures

        yield measure


@contextmanager
def llama(model: Path, options: argparse.Namespace) -> Iterator[Side]:
    """llama-server: one with a slot for each stream, one with a single long slot."""
    path = model.with_suffix(".gguf")
    if not path.exists():
        convert(model, path)
    flags = ("-ctk", "f32", "-ctv", "f32", "-t", str(options.threads), "-tb", str(options.threads))
    with ExitStack() as stack:
        many, long = (
            Served(stack.enter_context(llama_server(path, *flags, slots=slots, ctx=ctx)))
            for slots, ctx in (
                (max(options.streams), options.prompt + options.tokens + 16),
                (1, max(options.ttft) + 16),
            )
        )
        yield lambda options: speeds(many, long, options)


@contextmanager
def transformers(model: Path, options: argparse.Namespace) -> Iterator[Side]:
    """`generate_batch` of transformers, in this process."""
    import torch  # noqa: PLC0415 - only this side computes in this process
    from transformers import (  # noqa: PLC0415
        AutoModelForCausalLM,
        ContinuousBatchingConfig,
        GenerationConfig,
    )

    torch.set_num_threads(options.threads)
    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    sizes = ContinuousBatchingConfig(num_blocks=96, max_batch_tokens=512)

    def ask(*prompts: list[int], tokens: int) -> list[list[float]]:
        config: Any = GenerationConfig  # untyped in transformers
        limits = config(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        outputs = module.generate_batch(
            list(prompts),
            generation_config=limits,
            continuous_batching_config=sizes,
            record_timestamps=True,
            warmup=False,
        )
        return [[at - each.created_time for at in each.timestamps] for each in outputs.values()]

    def measure(options: argparse.Namespace) -> Figures:
        figures: Figures = {}
        for streams in options.streams:
            prompts = [prompt(options.prompt) for _ in range(streams)]
            figures[f"{streams} streams, tokens/s"] = rate(ask(*prompts, tokens=options.tokens))
        for tokens in options.ttft:
            figures[f"TTFT, {tokens} tokens, s"] = ask(prompt(tokens), tokens=2)[0][0]
        return figures

    yield measure


SIDES = {"embedded": embedded, "llama-server": llama, "transformers": transformers}


def report(results: dict[str, list[Figures]]) -> None:
    """One table: the best of all rounds."""
    names = list(dict.fromkeys(name for rounds in results.values() for name in rounds[0]))
    print("| | " + " | ".join(results) + " |\n|---" + "|---" * len(results) + "|")
    for name in names:
        best = max if name.endswith("tokens/s") else min
        cells = [
            f"{best(figures[name] for figures in rounds):.2f}" if name in rounds[0] else "–"
            for rounds in results.values()
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    """Measures all sides in turns."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--streams", type=numbers, default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each stream's prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each stream's answer")
    parser.add_argument("--ttft", type=numbers, default=[2000, 8000], help="lengths of prompts, in tokens")
    options = parser.parse_args()
    model = made_model(f"bench-94m-{CONTEXT}", *SIZES)
    names = [name for name in SIDES if name != "transformers" or find_spec("psutil")]
    with ExitStack() as stack:
        sides = {name: stack.enter_context(SIDES[name](model, options)) for name in names}
        results: dict[str, list[Figures]] = {name: [] for name in sides}
        for number in range(options.rounds):
            for name, measure in sides.items():
                results[name].append(measure(options))
                print(f"round {number + 1}, {name}: {json.dumps(results[name][-1])}", flush=True)
    report(results)


if __name__ == "__main__":
    main()
