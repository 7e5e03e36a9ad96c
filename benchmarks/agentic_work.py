"""Requests of coding agents, from a trace that has hashes of blocks and no text.

The trace is `kvct_openloop_512.jsonl.gz`, made from the sessions of kv-cache-tester (Apache-2.0). Each of its
blocks of 512 tokens becomes `SCALE` times fewer words, the same for the same hash, so that prompts share what
they shared. Answers are shorter by the same factor.
"""

from __future__ import annotations

import gzip
import random
from functools import cache
from pathlib import Path

import msgspec
from router_work import Question, answer_ids, text_of, tokenizer, words

SCALE = 16
# Of each engine: as 640,000 tokens in front of the whole prompts.
AGENTIC_KV_TOKENS = 40_000
_BLOCK_TOKENS = 512


class _Line(msgspec.Struct):
    """A request of the trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: str | int


def agentic_work(path: Path, requests: int, requests_per_s: float) -> list[Question]:
    """The first requests of the trace, in its rhythm, at that mean rate. Raises OSError."""
    with gzip.open(path) as file:
        lines = [
            msgspec.json.decode(line, type=_Line) for line, _ in zip(file, range(requests), strict=False)
        ]
    pace = len(lines) / requests_per_s / max(lines[-1].timestamp - lines[0].timestamp, 1)
    return [_question(line, pace * (line.timestamp - lines[0].timestamp)) for line in lines]


def _question(line: _Line, at: float) -> Question:
    last = line.input_length - (len(line.hash_ids) - 1) * _BLOCK_TOKENS
    texts = [_block(number) for number in line.hash_ids[:-1]]
    texts.append(_block(line.hash_ids[-1])[: max(last // SCALE, 1)])
    messages = ({"role": "user", "content": "".join(map(text_of, texts))},)
    token_ids = tokenizer().chat(list(messages)).token_ids
    answer = answer_ids(token_ids, max(line.output_length // SCALE, 1))
    return Question(at, str(line.session_id), messages, token_ids, answer)


@cache
def _block(number: int) -> tuple[int, ...]:
    """The words of the block with that hash."""
    dice = random.Random(number)  # noqa: S311 - not for secrets
    return tuple(dice.choices(tuple(words()), k=_BLOCK_TOKENS // SCALE))
