"""The loads of `router_cost.py`: chats of about 100 and about 8,000 tokens, whole answers and streams.

Chats share nothing but a language: lines of the standard library, drawn by a seed. They come in waves. First
come a wave's new chats, then the next turn of each. A router that remembers chats has to remember one wave.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from large_tokenizer import sources
from tokenizers import Tokenizer

MODEL = "m"
MESSAGE_TOKENS = 500
# Tokens that the next turn adds: the answer and a question.
ANSWER_TOKENS, QUESTION_TOKENS = 100, 50
CHUNKS = 64
_SAMPLE_LINES = 2000
_SHORTEST_LINE = 8


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one kind.

    Attributes:
        name: for tables.
        tokens: of a chat, about.
        connections: how many clients send, each after its last answer.
        requests: in all, in waves of `wave`.
        chunks: of a streamed answer; 0 for a whole one.
        interval_us: from chunk to chunk, at the engine.
        goal_us: of a router's CPU for a new chat; None without a goal.
        next_goal_us: of a router's CPU for the next turn of a known chat.
    """

    name: str
    tokens: int
    connections: int
    requests: int
    wave: int
    chunks: int = 0
    interval_us: int = 0
    goal_us: float | None = None
    next_goal_us: float | None = None

    def shorter(self, by: int) -> Load:
        """With one `by`-th of the requests, at least four for each connection."""
        requests = max(self.requests // by, 4 * self.connections)
        return replace(self, requests=requests, wave=min(self.wave, requests))


LOADS = (
    Load("small c1", 100, 1, 2048, 64, goal_us=250),
    Load("small c16", 100, 16, 4096, 256, goal_us=200),
    Load("small c64", 100, 64, 8192, 1024, goal_us=200),
    Load("long c1", 8000, 1, 384, 64, goal_us=1000, next_goal_us=400),
    Load("long c16", 8000, 16, 768, 96, goal_us=1000, next_goal_us=400),
    Load("SSE 64", 100, 16, 1024, 256, CHUNKS, goal_us=300),
    Load("SSE 64 paced", 100, 16, 256, 128, CHUNKS, interval_us=2000),
)


@dataclass(frozen=True, slots=True)
class Wave:
    """Bodies of requests: chats, and the next turn of each."""

    first: list[bytes]
    next: list[bytes]


class Chats:
    """Draws chats.

    Args:
        tokenizer: directory of the tokenizer that the lengths are measured with.
        seed: of the draws.
    """

    def __init__(self, tokenizer: Path, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - not for secrets
        self._lines = [line for text in sources() for line in text.splitlines() if len(line) > _SHORTEST_LINE]
        sample = self._text(_SAMPLE_LINES)
        ids = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(sample).ids
        self._tokens_per_line = len(ids) / _SAMPLE_LINES

    def waves(self, load: Load) -> Iterator[Wave]:
        """The requests of a load."""
        for begun in range(0, load.requests, load.wave):
            count = min(load.wave, load.requests - begun)
            chats = [self._chat(load.tokens) for _ in range(count)]
            first = [self._body(load, chat) for chat in chats]
            for chat in chats:
                chat += [self._message("assistant", ANSWER_TOKENS), self._message("user", QUESTION_TOKENS)]
            yield Wave(first, [self._body(load, chat) for chat in chats])

    def _chat(self, tokens: int) -> list[dict[str, str]]:
        turns = max(tokens // MESSAGE_TOKENS, 1) | 1  # the last one is the user's
        return [self._message(("user", "assistant")[turn % 2], tokens // turns) for turn in range(turns)]

    def _message(self, role: str, tokens: int) -> dict[str, str]:
        return {"role": role, "content": self._text(max(round(tokens / self._tokens_per_line), 1))}

    def _text(self, lines: int) -> str:
        return "\n".join(self._random.choices(self._lines, k=lines))

    @staticmethod
    def _body(load: Load, messages: list[dict[str, str]]) -> bytes:
        body = {"model": MODEL, "messages": messages, "max_tokens": load.chunks or 1, "temperature": 0}
        return msgspec.json.encode(body | ({"stream": True} if load.chunks else {}))
