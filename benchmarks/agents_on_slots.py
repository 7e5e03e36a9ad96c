"""Coding agents on a llama-server that has fewer slots than they are: how many prompt tokens are reused?

Each conversation is Codex itself (`codex exec`, then `codex exec resume`) or Claude Code (`claude -p`, then
with `-c`; of its tools the shell alone, to save time) about a file of its own. Prompts of all of them begin
with the agent's instructions and tools. Conversations take turns. A relay before the server, or before
kvpin, takes the time to the first token.

    up         the server stays up
    restart    the server ends and starts again before each round but the first
    two        two servers; without kvpin, each turn goes to any of them

The model is tiny and its answers are noise: agents call no tool, and each turn is one request. A bias makes
the answers short and lets them end. A limit (`-n`) would not do: kvpin gives an answer that a limit cut the
status `incomplete`, as OpenAI does, and Codex then ends with an error. llama-server calls it `completed`.

    python benchmarks/agents_on_slots.py [--agent "Claude Code"] [--cases up,restart,two] [--conversations 5]
                                         [--slots 2] [--turns 3]
                                         [--setups "default flags,--cache-ram 0,kvpin"] [--lines 300]

`scripts/agents` installs both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from coding_agents import AGENTS, HOME, MODEL, Notes, started
from default_server import Servers, Setup, alone, behind_kvpin
from harness import ROOT, host_cache, some_of

sys.path.insert(0, str(ROOT))
from scripts.make_gguf import gguf_path

CASES = ("up", "restart", "two")
SETUPS = {"default flags": (), "--cache-ram 0": ("--cache-ram", "0"), "kvpin": ("--cache-ram", "0")}
CTX = 49_152
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
    """A conversation with an agent, which keeps it in the directory `home`. `command` runs the agent."""

    def __init__(self, agent: str, command: Sequence[str], home: Path) -> None:
        self._agent, self._command, self._home = agent, command, home
        self._used = Usage()
        self._has_begun = False
        home.mkdir()

    def say(self, url: str, text: str) -> Usage:
        """Runs one turn against the API at `url`; returns its own usage. Exits if the agent does not end
        it."""
        ask = _codex if self._agent == "Codex" else _claude
        told = ask(self._command, self._home, url, text, goes_on=self._has_begun)
        self._has_begun = True
        if self._agent != "Codex":
            return told
        # Codex tells the usage of all turns so far.
        before, self._used = self._used, told
        return Usage(told.cached - before.cached, told.prompt - before.prompt)


def _codex(program: Sequence[str], home: Path, url: str, text: str, *, goes_on: bool) -> Usage:
    provider = "model_providers.kvpin"
    settings = {
        "model_provider": "kvpin",
        f"{provider}.name": "kvpin",
        f"{provider}.base_url": f"{url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.stream_max_retries": 0,
    }
    flags = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    verb = ["exec", "resume", "--last"] if goes_on else ["exec"]
    common = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json", "-m", MODEL]
    printed = _run([*program, *verb, *common, *flags, text], home, {"CODEX_HOME": str(home)})
    events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    told = [event["usage"] for event in events if event.get("type") == "turn.completed"]
    if not told:
        last = printed.strip().rpartition("\n")[2]
        raise SystemExit(f"Codex did not complete its turn: {last or 'it printed nothing'}")
    return Usage(told[0]["cached_input_tokens"], told[0]["input_tokens"])


def _claude(program: Sequence[str], home: Path, url: str, text: str, *, goes_on: bool) -> Usage:
    command = [*program, "-p", text, "--model", MODEL, "--output-format", "json", "--tools", "Bash"]
    environment = {**AGENTS["Claude Code"].env, "ANTHROPIC_BASE_URL": url}
    printed = _run([*command, *(["-c"] if goes_on else [])], home, environment)
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    if not lines or lines[-1].get("is_error"):
        raise SystemExit(f"Claude Code did not complete its turn: {printed[-300:] or 'it printed nothing'}")
    used = lines[-1]["usage"]
    cached = used["cache_read_input_tokens"]
    return Usage(cached, cached + used["cache_creation_input_tokens"] + used["input_tokens"])


def _run(command: Sequence[str], home: Path, environment: Mapping[str, str]) -> str:
    """What a command prints, run in a directory that is its home, too."""
    return subprocess.run(
        command,
        cwd=home,
        env={**os.environ, "HOME": str(home), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    ).stdout


def file_of(number: int, lines: int) -> str:
    """The file that a conversation is about; no two are alike."""
    return " ".join(f"line {line} of file {number}: {line * (number + 7)} bytes." for line in range(lines))


def converse(
    setup: Setup, agent: str, count: int, turns: int, lines: int, *, restarts: bool
) -> Iterator[tuple[Usage, list[float]]]:
    """All conversations, turn by turn; yields the usage of each round, and the times to a first token."""
    choice = random.Random(7)  # noqa: S311 - the same choices each time
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        relays = [started(stack, Notes(url)) for url in setup.urls]
        command = [str(HOME / AGENTS[agent].command[0])]
        conversations = [Conversation(agent, command, Path(directory, str(at))) for at in range(count)]
        for turn in range(turns):
            if turn and restarts:
                setup.restart()
            used = Usage()
            for relay in relays:
                relay.requests.clear()
            for number, conversation in enumerate(conversations):
                text = f"And line {turn}?" if turn else f"Explain this file. {file_of(number, lines)}"
                used = used.plus(conversation.say(choice.choice(relays).url, text))
            yield (
                used,
                [each.first_s for relay in relays for each in relay.requests if each.first_s is not None],
            )


def run(case: str, name: str, arguments: argparse.Namespace) -> Iterator[tuple[Usage, list[float]]]:
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
        size = arguments.agent, arguments.conversations, arguments.turns, arguments.lines
        yield from converse(setup, *size, restarts=case == "restart")


def main() -> None:
    """Prints a line for each round of each setup of each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agent", choices=("Codex", "Claude Code"), default="Codex")
    parser.add_argument("--cases", type=some_of(CASES), default=CASES)
    parser.add_argument("--setups", type=some_of(SETUPS), default=tuple(SETUPS))
    parser.add_argument("--conversations", type=int, default=5)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--lines", type=int, default=300, help="of each conversation's file")
    arguments = parser.parse_args()
    for case in arguments.cases:
        print(
            f"{arguments.agent}, {case}: {arguments.conversations} conversations, {arguments.slots} slots",
            flush=True,
        )
        for name in arguments.setups:
            for number, (used, first_s) in enumerate(run(case, name, arguments), 1):
                time = f"first token {statistics.median(first_s):5.2f} s" if first_s else ""
                print(f"  {name:14} | round {number} | {used} | {time}", flush=True)


if __name__ == "__main__":
    main()
