"""Measures what real engines save if kvpin sends them token ids beside, or instead of, the text of a chat.

A chat begins with a long document, which the engine's cache holds. Its last question is new each time, so
that little is left to compute. It goes as messages and with its ids straight to the engine, and as messages
through kvpin, which adds the ids. The three take turns, so that all see the same load of the machine. The
model is tiny; its tokenizer has as many entries as Qwen2.5's.

    python benchmarks/ready_tokens.py vllm|sglang [--tokens 8000 32000 100000] [--rounds 30]

Installs the engine on first use: see scripts/vllm and scripts/sglang.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
from harness import CACHE, ROOT
from large_tokenizer import QWEN_ENTRIES, large_tokenizer, sources

sys.path.insert(0, str(ROOT))
from engine_adapter.prompt.chat import ChatTokenizer
from scripts.make_checkpoint import make_model
from scripts.make_gguf import Shape
from tests.live.server_world import MODEL, ServerWorld
from tests.sglang_live.sglang_world import SglangOptions, sglang_world
from tests.vllm_live.vllm_world import BLOCK, VllmOptions, vllm_world

SHAPE = Shape("llama", 1, 64, 128, 1, 1, 64)  # attention over 100,000 tokens must end within minutes on a CPU
SPARE = 2048  # tokens of context beside the document
SAMPLED = 16  # the first chats that kvpin compares with the engine's ids, and sends without its own
FIRST_S = 1800.0  # to compute the document
_CACHED = re.compile(r'"cached_tokens":\s*(\d+)')
_WITH_IDS: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "vllm": lambda ids: {"kv_transfer_params": {"prompt_token_ids": ids}},
    "sglang": lambda ids: {"input_ids": ids},
}
MESSAGES, IDS, THROUGH = "messages", "messages and token ids", "messages through kvpin"


def large_model(context: int) -> Path:
    """A model with a large vocabulary and this context, in tokens; made on first use."""
    directory = CACHE / f"ready-tokens-{QWEN_ENTRIES}-{context}"
    if not directory.exists():
        make_model(directory, shape=SHAPE, tokenizer=large_tokenizer(QWEN_ENTRIES), context=context)
    return directory


def engine(kind: str, logs: Path, context: int) -> AbstractContextManager[ServerWorld]:
    """An engine that holds two chats of this context, and a kvpin in front of it."""
    model, room = large_model(context), 2 * context
    if kind == "vllm":
        flags = ("--enable-scale-out",)
        return vllm_world(logs, VllmOptions(blocks=room // BLOCK, context=context, model=model, flags=flags))
    return sglang_world(logs, SglangOptions(tokens=room, model=model))


def chat(document: str, question: str) -> list[dict[str, str]]:
    """The chat that asks a question about a document."""
    return [
        {"role": "user", "content": document},
        {"role": "assistant", "content": "I have read it."},
        {"role": "user", "content": question},
    ]


def first_token_s(client: httpx.Client, url: str, body: dict[str, Any]) -> tuple[float, int]:
    """Seconds to the first event with an answer, and the reused tokens that the stream reports."""
    body = {"model": MODEL, "max_tokens": 1, "temperature": 0, "stream": True, **body}
    body["stream_options"] = {"include_usage": True}
    started = time.perf_counter()
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        lines = response.iter_lines()
        next(lines)
        seconds = time.perf_counter() - started
        reused = [int(match[1]) for line in lines if (match := _CACHED.search(line))]
    return seconds, reused[-1] if reused else 0


def measure(kind: str, world: ServerWorld, document: str, tokenizer: ChatTokenizer, rounds: int) -> None:
    """Measures one length, and prints it."""
    seconds, cached = defaultdict(list), defaultdict(list)
    server, proxy = world.servers[0].url, world.kvpin.url
    with httpx.Client(timeout=FIRST_S, trust_env=False) as client:
        computed, _ = first_token_s(client, server, {"messages": chat(document, "What is it?")})
        for number in range(-3, rounds):
            for way in (MESSAGES, IDS, THROUGH):
                messages = chat(document, f"Question {number}, asked with {way}: what is said of it?")
                body: dict[str, Any] = {"messages": messages}
                if way == IDS:
                    ids = tokenizer.encode(tokenizer.render(messages), add_special_tokens=False).tolist()
                    body |= _WITH_IDS[kind](ids)
                taken, reused = first_token_s(client, proxy if way == THROUGH else server, body)
                if number >= 0:
                    seconds[way].append(taken)
                    cached[way].append(reused)
    medians = {way: statistics.median(each) for way, each in seconds.items()}
    reused = min(map(min, cached.values()))
    print(f"{kind}: chats of {len(ids)} tokens, {reused} or more reused; first computed in {computed:.1f} s")
    for way, median in medians.items():
        ratio = medians[MESSAGES] / median
        took = f"{1000 * median:7.1f} ms to the first token (median of {rounds})"
        print(f"  {way:24} {took}, {ratio:.2f}x", flush=True)


def main() -> None:
    """Runs it for each length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=_WITH_IDS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8000, 32_000, 100_000])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    tokenizer = ChatTokenizer.load(str(large_tokenizer(QWEN_ENTRIES)))
    ids = tokenizer.encode("\n".join(sources()[100:]), add_special_tokens=False)
    context = -(-(max(options.tokens) + SPARE) // BLOCK) * BLOCK
    with tempfile.TemporaryDirectory() as logs, engine(options.kind, Path(logs), context) as world:
        for number in range(SAMPLED):
            world.post("chat/completions", {"messages": chat("Be brief.", f"What is {number}?")})
        for tokens in options.tokens:
            document, ids = tokenizer.decode(ids[:tokens]), ids[tokens:]  # the lengths share nothing
            measure(options.kind, world, document, tokenizer, options.rounds)


if __name__ == "__main__":
    main()
