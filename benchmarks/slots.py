"""More conversations than slots: how many prompt tokens are reused?

One llama-server with 4 slots serves 5, 8 and 16 conversations in turn, for 10 rounds. Each grows by a turn
per round. The same conversations go through kvpin, straight to a server with `--cache-ram 0` (which picks
slots itself), straight to one with default flags, and to one with a slot for each conversation, which reuses
all that is possible. Each prediction of kvpin is compared with the server's report.

    python benchmarks/slots.py [--rounds 10] [--slots 4] [--conversations 5 8 16] [--model tiny|large]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
from harness import ROOT, host_cache, kvpin, llama_server

sys.path.insert(0, str(ROOT))
from scripts.make_gguf import gguf_path

CTX = 4096
MAX_TOKENS = 24
WORDS_A_TURN = 60
# Of a text that does not change: each run has the same prompts.
VOCABULARY = [word for word in (ROOT / "LICENSE").read_text().split() if word.isalpha()]


@dataclass(slots=True)
class Column:
    """The results of one setup.

    Attributes:
        cached: reused prompt tokens, as reported.
        possible: tokens that the conversation's last turn left in its slot.
        hits: turns after the first that reused at least half of what was possible.
        turns: turns after the first.
        exact: requests with an exact prediction.
        asked: all requests.
        ttft_s: time to the first token of turns after the first.
    """

    cached: int = 0
    possible: int = 0
    hits: int = 0
    turns: int = 0
    exact: int = 0
    asked: int = 0
    ttft_s: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Share of the possible tokens that were reused."""
        return self.cached / self.possible if self.possible else 0.0


def converse(url: str, conversations: int, rounds: int, pin: Callable[[int], dict[str, int]]) -> Column:
    """All conversations in turn, `rounds` times; `pin` adds fields to the requests of a conversation."""
    column = Column()
    words = random.Random(7)  # noqa: S311 - the same talk each time
    chats: list[list[dict[str, str]]] = [
        [{"role": "system", "content": f"You are helper number {number}."}] for number in range(conversations)
    ]
    left = [0] * conversations
    # A new connection each time: llama-server closes a kept one without a word.
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=url, timeout=600, limits=limits) as client:
        for turn in range(rounds):
            for number, chat in enumerate(chats):
                text = " ".join(words.choice(VOCABULARY) for _ in range(WORDS_A_TURN))
                chat.append({"role": "user", "content": text})
                answer = ask(client, chat, pin(number))
                chat.append({"role": "assistant", "content": answer.text})
                if turn:
                    column.turns += 1
                    column.cached += answer.cached
                    column.possible += left[number]
                    column.hits += 2 * answer.cached >= left[number]
                    column.ttft_s.append(answer.ttft_s)
                column.asked += 1
                column.exact += answer.predicted == answer.cached
                left[number] = answer.tokens - 1
    return column


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer: its text, tokens of prompt and text, reused ones, what was predicted."""

    text: str
    tokens: int
    cached: int
    predicted: int | None
    ttft_s: float


def ask(client: httpx.Client, messages: list[dict[str, str]], extra: Mapping[str, object]) -> Answer:
    """Streams one greedy answer."""
    body = {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True, **extra}
    body["stream_options"] = {"include_usage": True}
    text, ttft_s, usage = "", 0.0, {}
    started = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event: dict[str, Any] = msgspec.json.decode(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
            if piece and not text:
                ttft_s = time.perf_counter() - started
            text += piece or ""
    predicted = response.headers.get("x-kvpin-predicted-tokens")
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(text, usage["total_tokens"], cached, int(predicted) if predicted else None, ttft_s)


def nowhere(_number: int) -> dict[str, int]:
    """The server picks the slot."""
    return {}


def own_slot(number: int) -> dict[str, int]:
    """Every conversation has a slot of its own."""
    return {"id_slot": number}


def table(model: Path, slots: int, conversations: int, rounds: int) -> dict[str, Column]:
    """The four columns for one number of conversations."""
    columns = {}
    off = ("--cache-ram", "0")
    with (
        host_cache() as directory,
        llama_server(model, *off, slots=slots, ctx=CTX, save_dir=directory) as server,
        kvpin("--engine", f"llama_server={server},host_cache_dir={directory}") as url,
    ):
        columns["kvpin"] = converse(url, conversations, rounds, nowhere)
    with llama_server(model, *off, slots=slots, ctx=CTX) as url:
        columns["--cache-ram 0"] = converse(url, conversations, rounds, nowhere)
    with llama_server(model, slots=slots, ctx=CTX) as url:
        columns["default flags"] = converse(url, conversations, rounds, nowhere)
    with llama_server(model, *off, slots=conversations, ctx=CTX) as url:
        columns["slot for each"] = converse(url, conversations, rounds, own_slot)
    return columns


def main() -> None:
    """Prints a table for each number of conversations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--conversations", type=int, nargs="+", default=[5, 8, 16])
    parser.add_argument("--model", choices=["tiny", "large"], default="tiny")
    arguments = parser.parse_args()
    model = gguf_path(arguments.model)
    for conversations in arguments.conversations:
        columns = table(model, arguments.slots, conversations, arguments.rounds)
        print(f"{conversations} conversations, {arguments.slots} slots, {arguments.rounds} rounds")
        for name, column in columns.items():
            print(
                f"  {name:14} reused {column.rate:6.1%} of the possible | "
                f"turns that reuse {column.hits}/{column.turns} | "
                f"TTFT median {statistics.median(column.ttft_s) * 1000:.0f} ms"
                + (f" | predicted {column.exact}/{column.asked}" if name == "kvpin" else ""),
                flush=True,
            )


if __name__ == "__main__":
    main()
