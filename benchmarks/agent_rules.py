"""Measures the tokens that each rule saves on recorded coding sessions.

The recordings hold conversations without a system prompt. Each run puts one before them, with one cause of
misses as users of coding agents report it, and asks `kvpin advise`'s own code what each rule would save. A
cache keeps everything: what is not cached differs.

    python benchmarks/agent_rules.py lmcache_agent_traces_text.tar.gz [--part miniswe]

The archive is of https://github.com/LMCache/lmcache-agent-trace (Apache-2.0).
"""

from __future__ import annotations

import argparse
import json
import random
import tarfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from proxy.observe.recorder import text_blocks
from proxy.replay.advise import AdviceLine, advise

# A system prompt of about 2,500 tokens, and tools of about 1,500: less than coding agents have.
RULES = "\n".join(
    f"Rule {number}: read a file before you change it, and run its tests." for number in range(150)
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": f"tool_{letter}", "description": f"Does {letter}. " * 30, "parameters": {}},
    }
    for letter in "abcdefghijklm"
]
BYTES_PER_TOKEN = 4


class Turn(NamedTuple):
    """A request of a session."""

    at: float
    session: str
    text: str


def turns_of(archive: Path, part: str) -> list[Turn]:
    """The requests of one part of the archive, in the order of their times."""
    turns = list[Turn]()
    with tarfile.open(archive) as packed:
        for member in packed:
            if member.isfile() and f"/{part}/" in f"/{member.name}":
                lines = map(json.loads, packed.extractfile(member) or ())
                turns += (Turn(each["timestamp"] / 1e6, member.name, each["input"]) for each in lines)
    return sorted(turns)


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def _shuffled(session: str) -> list[Any]:
    return random.Random(session).sample(TOOLS, len(TOOLS))  # noqa: S311 - no secret


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=3).hexdigest()


# A cause → the beginning of the system prompt, and the tools.
CAUSES: dict[str, Callable[[Turn], tuple[str, list[Any]]]] = {
    "nothing": lambda _turn: ("", TOOLS),
    "billing line": lambda turn: (f"x-anthropic-billing-header: cch={_digest(str(turn))};\n", TOOLS),
    "time in the prompt": lambda turn: (f"You are an agent. It is {_stamp(turn.at)}.\n", TOOLS),
    "git status": lambda turn: (f"Current branch: fix-{_digest(str(turn))}\n", TOOLS),
    "working directory": lambda turn: (f"Working directory: /work/trees/{_digest(turn.session)}\n", TOOLS),
    "order of tools": lambda turn: ("", _shuffled(turn.session)),
}


def lines_of(turns: list[Turn], cause: str) -> Iterator[AdviceLine]:
    """The requests as a recording holds them."""
    for turn in turns:
        head, tools = CAUSES[cause](turn)
        messages = [{"role": "system", "content": head + RULES}, {"role": "user", "content": turn.text}]
        size = sum(len(json.dumps(each)) for each in (*tools, *messages))
        blocks = text_blocks({"tools": tools, "messages": messages}, lambda: blake2b(digest_size=8))
        yield AdviceLine(size // BYTES_PER_TOKEN, turn.session, blocks)


def main() -> None:
    """Prints a row for each cause."""
    parser = argparse.ArgumentParser(description="What each rule saves on recorded coding sessions.")
    parser.add_argument("archive", type=Path)
    parser.add_argument("--part", default="miniswe")
    arguments = parser.parse_args()
    if not arguments.archive.exists():
        parser.error(f"{arguments.archive} is not there: see --help")
    turns = turns_of(arguments.archive, arguments.part)
    for cause in CAUSES:
        advice = advise(lines_of(turns, cause))
        cached = advice.cached_tokens / advice.tokens
        print(f"{cause}: {advice.requests} requests, {advice.tokens:,} tokens, {cached:.1%} cached")
        for name, saving in advice.rules.items():
            after = (advice.cached_tokens + saving.tokens) / advice.tokens
            share = saving.requests / advice.requests
            print(f"    {name}: {saving.tokens:,.0f} tokens more on {share:.0%} of the requests: {after:.1%}")
        for name, cost in advice.changes.items():
            print(f"    the client changes {name}: {cost.tokens:,.0f} tokens on {cost.requests} requests")


if __name__ == "__main__":
    main()
