"""Coding agents on a llama-server that has fewer slots than they are: how many prompt tokens are reused?

Each conversation is Codex itself (`codex exec`, then `codex exec resume`) about a file of its own. Prompts of
all of them begin with Codex's instructions and tools. Conversations take turns.

    up         the server stays up
    restart    the server ends and starts again before each round but the first
    two        two servers; without kvpin, each turn goes to any of them

The model is tiny and its answers are noise: Codex calls no tool, and each turn is one request. A bias makes
the answers short and lets them end. A limit (`-n`) would not do: kvpin gives an answer that a limit cut the
status `incomplete`, as OpenAI does, and Codex then ends with an error. llama-server calls it `completed`.

    python benchmarks/agents_on_slots.py [--cases up,restart,two] [--conversations 5] [--slots 2] [--turns 3]
                                         [--setups "default flags,--cache-ram 0,kvpin"] [--lines 300]

Codex is the one that `scripts/test-clients -k Codex` installs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from default_server import Servers, Setup, alone, behind_kvpin
from harness import CACHE, ROOT, host_cache, some_of

sys.path.insert(0, str(ROOT))
from scripts.make_gguf import gguf_path

CASES = ("up", "restart", "two")
SETUPS = {"default flags": (), "--cache-ram 0": ("--cache-ram", "0"), "kvpin": ("--cache-ram", "0")}
CTX = 32_768
END = ("--logit-bias", "2+2", "--seed", "7")
"""Token 2 ends an answer."""


class Usage(NamedTuple):
    """Prompt tokens, and how many of them were cached."""

    cached: int = 0
    prompt: int = 0

    def __str__(self) -> str:
        """For people."""
        computed = self.prompt - self.cached
        share = self.cached / max(self.prompt, 1)
        return f"cached {self.cached:7,} of {self.prompt:7,} ({share:5.1%}), computed {computed:6,}"

    def plus(self, other: Usage) -> Usage:
        """The sum."""
        return Usage(self.cached + other.cached, self.prompt + other.prompt)


class Conversation:
    """A conversation with Codex, which keeps it in the directory `home`. `command` runs Codex."""

    def __init__(self, command: Sequence[str], home: Path) -> None:
        self._command, self._home = command, home
        self._used = Usage()
        home.mkdir()

    def say(self, url: str, text: str) -> Usage:
        """Runs one turn against the API at `url`; returns its own usage. Exits if Codex does not end it."""
        provider = "model_providers.kvpin"
        settings = {
            "model_provider": "kvpin",
            f"{provider}.name": "kvpin",
            f"{provider}.base_url": f"{url}/v1",
            f"{provider}.wire_api": "responses",
            f"{provider}.stream_max_retries": 0,
        }
        flags = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
        verb = ["exec", "resume", "--last"] if self._used.prompt else ["exec"]
        common = [
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            "--json",
            "-m",
            "tiny",
        ]
        done = subprocess.run(
            [*self._command, *verb, *common, *flags, text],
            cwd=self._home,
            env={**os.environ, "HOME": str(self._home), "CODEX_HOME": str(self._home)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=False,
        )
        events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        told = [event["usage"] for event in events if event.get("type") == "turn.completed"]
        if not told:
            last = done.stdout.strip().rpartition("\n")[2]
            raise SystemExit(f"Codex did not complete its turn: {last or 'it printed nothing'}")
        # Codex tells the usage of all turns so far.
        before, self._used = self._used, Usage(told[0]["cached_input_tokens"], told[0]["input_tokens"])
        return Usage(self._used.cached - before.cached, self._used.prompt - before.prompt)


def codex() -> list[str]:
    """The command that runs the installed Codex. Ends the benchmark if there is none."""
    homes = sorted(CACHE.glob("clients-codex-*/node_modules"))
    if not homes:
        raise SystemExit("Codex is not installed: run `scripts/test-clients -k Codex` first")
    return [str(homes[-1] / ".bin" / "node"), str(homes[-1] / "@openai" / "codex" / "bin" / "codex.js")]


def file_of(number: int, lines: int) -> str:
    """The file that a conversation is about; no two are alike."""
    return " ".join(f"line {line} of file {number}: {line * (number + 7)} bytes." for line in range(lines))


def converse(setup: Setup, count: int, turns: int, lines: int, *, restarts: bool) -> Iterator[Usage]:
    """All conversations, turn by turn; yields the usage of each round."""
    choice, command = random.Random(7), codex()  # noqa: S311 - the same choices each time
    with tempfile.TemporaryDirectory() as directory:
        conversations = [Conversation(command, Path(directory, str(number))) for number in range(count)]
        for turn in range(turns):
            if turn and restarts:
                setup.restart()
            used = Usage()
            for number, conversation in enumerate(conversations):
                text = f"And line {turn}?" if turn else f"Explain this file. {file_of(number, lines)}"
                used = used.plus(conversation.say(choice.choice(setup.urls), text))
            yield used


def run(case: str, name: str, arguments: argparse.Namespace) -> Iterator[Usage]:
    """The rounds of one setup of one case."""
    with ExitStack() as stack:
        memory = stack.enter_context(host_cache())
        flags, count = (*SETUPS[name], *END), 1 + (case == "two")
        servers = Servers(gguf_path("tiny"), flags, count, memory, slots=arguments.slots, ctx=CTX)
        setup = (
            behind_kvpin(stack, servers, f"host_cache_dir={memory}")
            if name == "kvpin"
            else alone(stack, servers)
        )
        size = arguments.conversations, arguments.turns, arguments.lines
        yield from converse(setup, *size, restarts=case == "restart")


def main() -> None:
    """Prints a line for each round of each setup of each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=some_of(CASES), default=CASES)
    parser.add_argument("--setups", type=some_of(SETUPS), default=tuple(SETUPS))
    parser.add_argument("--conversations", type=int, default=5)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--lines", type=int, default=300, help="of each conversation's file")
    arguments = parser.parse_args()
    for case in arguments.cases:
        print(f"{case}: {arguments.conversations} conversations, {arguments.slots} slots", flush=True)
        for name in arguments.setups:
            for number, used in enumerate(run(case, name, arguments), 1):
                print(f"  {name:14} | round {number} | {used}", flush=True)


if __name__ == "__main__":
    main()
