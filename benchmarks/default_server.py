"""llama-server as it is by default, and kvpin in front of it: where is kvpin faster, and where is it not?

12 conversations take turns on 4 slots. The first prompt of each has about 1,500 tokens; each further turn
adds about 60. Straight to a server, and through kvpin in front of a server with `--cache-ram 0`:

    talks      the server stays up
    restart    the server ends and starts again before each round but the first
    two        two servers; without kvpin, each request goes to any of them
    full       the cache in host memory holds 4 of the 12 conversations; kvpin has a disk tier beside it
    tenants    one tenant has asked first prompts that another one asks now, too
    burst      an application asks 48 questions at the same moment, for answers in one piece

Straight to the server, "default flags" names no number of slots: llama-server then has 4 slots and one KV
buffer that they share, as with "-np 4 -kvu". With "default -np 4", each slot has its own part of the buffer.
CPU time is that of the servers, not of kvpin.

    python benchmarks/default_server.py [--cases talks,restart,two,full,tenants,burst] [--rounds 4]
                                        [--model tiny|large] [--words 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from harness import CACHE, ROOT, free_port, host_cache, kvpin, llama_server, some_of
from slot_restore import wait_written_back
from slots import MAX_TOKENS, VOCABULARY, Answer, ask

sys.path.insert(0, str(ROOT))
from scripts.make_gguf import gguf_path

CASES = ("talks", "restart", "two", "full", "tenants", "burst")
STRAIGHT = {
    "default flags": ("-np", "-1"),
    "default -np 4": (),
    "-np 4 -kvu": ("-kvu",),
    "--cache-ram 0": ("--cache-ram", "0"),
}
THROUGH = ("--cache-ram", "0")
TALKS, SLOTS, CTX, TURN_WORDS = 12, 4, 4096, 40
MIB = 1 << 20
CACHE_MIB = {"tiny": 13, "large": 104}
"""Room for the KV of four conversations, by model."""
KEYS = {"KVPIN_API_KEYS": '[{"key": "a", "tenant": "a"}, {"key": "b", "tenant": "b"}]'}
AWAY_S = 60.0
REQUESTS, BURST_WORDS = 48, 60


@dataclass(slots=True)
class Column:
    """The answers of one setup.

    Attributes:
        first, later: those of the first round, and of all others.
        possible: tokens that the conversations' turns before `later` left.
        cpu_s: CPU time of the servers for `first` and `later`.
    """

    first: list[Answer] = field(default_factory=list)
    later: list[Answer] = field(default_factory=list)
    possible: int = 0
    cpu_s: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def lines(self) -> list[str]:
        """The first round, and the others, if there are any."""
        tokens = sum(answer.tokens for answer in self.first)
        rounds = [("first round", self.first, tokens, self.cpu_s[0])]
        if self.later:
            rounds.append(("later", self.later, self.possible, self.cpu_s[1]))
        return [
            f"{name:11} | reused {sum(answer.cached for answer in answers):7,} of {possible:7,} | "
            f"first token {statistics.median(answer.ttft_s for answer in answers) * 1000:5.0f} ms | "
            f"CPU {cpu_s / len(answers) * 1000:5.0f} ms a request"
            for name, answers, possible, cpu_s in rounds
        ]


class Servers:
    """llama-servers of `slots` slots of `ctx` tokens. They keep their ports when they are started again."""

    def __init__(
        self,
        model: Path,
        flags: Sequence[str],
        count: int,
        directory: Path | None,
        *,
        slots: int = SLOTS,
        ctx: int = CTX,
    ) -> None:
        self._model, self._flags, self._directory = model, flags, directory
        self._slots, self._ctx = slots, ctx
        self._ports = [free_port() for _ in range(count)]
        self.urls = [f"http://127.0.0.1:{port}" for port in self._ports]
        self._running, self._ended_s = ExitStack(), 0.0

    def start(self) -> None:
        """Starts them."""
        for port in self._ports:
            server = llama_server(
                self._model,
                *self._flags,
                slots=self._slots,
                ctx=self._ctx,
                save_dir=self._directory,
                port=port,
            )
            self._running.enter_context(server)

    def stop(self) -> None:
        """Ends them."""
        self._ended_s = self.cpu_s()
        self._running.close()

    def cpu_s(self) -> float:
        """CPU time of the servers so far, those that have ended included."""
        return self._ended_s + sum(map(_cpu_s, self._ports))


def _cpu_s(port: int) -> float:
    """CPU time of the process that was started with this port; 0 if there is none."""
    named = f"\0--port\0{port}\0".encode()
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if named in command.read_bytes():
                user, system = command.with_name("stat").read_text().rpartition(")")[2].split()[11:13]
                return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        except OSError:
            continue  # it has ended meanwhile
    return 0.0


@dataclass(frozen=True, slots=True)
class Setup:
    """A way to serve the conversations.

    Attributes:
        urls: one for each address that a request may go to.
        servers: those behind them.
        restart: ends the servers and starts them again.
    """

    urls: list[str]
    servers: Servers
    restart: Callable[[], None]


def converse(setup: Setup, rounds: int, words: int, *, restarts: bool = False, key: str = "a") -> Column:
    """All conversations in turn, `rounds` times."""
    column, choice = Column(), random.Random(7)  # noqa: S311 - the same talks each time
    chats: list[list[dict[str, str]]] = [[] for _ in range(TALKS)]
    left = [0] * TALKS
    for turn in range(rounds):
        if turn and restarts:
            setup.restart()
        before_s = setup.servers.cpu_s()
        for number, chat in enumerate(chats):
            text = " ".join(choice.choice(VOCABULARY) for _ in range(TURN_WORDS if turn else words))
            chat.append({"role": "user", "content": text})
            with _client(choice.choice(setup.urls), key) as client:
                answer = ask(client, chat, {})
            chat.append({"role": "assistant", "content": answer.text})
            (column.later if turn else column.first).append(answer)
            column.possible += left[number]
            left[number] = answer.tokens - 1
        column.cpu_s[bool(turn)] += setup.servers.cpu_s() - before_s
    return column


async def at_once(setup: Setup, rounds: int) -> list[str]:
    """Bursts of an application's requests: how long they wait for their answers."""
    choice = random.Random(7)  # noqa: S311 - the same texts each time
    connections = httpx.Limits(max_connections=None)
    lines = []
    async with httpx.AsyncClient(base_url=setup.urls[0], timeout=600, limits=connections) as client:

        async def ask_all() -> list[float]:
            began, waits = time.perf_counter(), []

            async def asked(text: str) -> None:
                body = {"messages": [{"role": "user", "content": text}], "max_tokens": MAX_TOKENS}
                (await client.post("/v1/chat/completions", json=body)).raise_for_status()
                waits.append(time.perf_counter() - began)

            texts = [" ".join(choice.choices(VOCABULARY, k=BURST_WORDS)) for _ in range(REQUESTS)]
            await asyncio.gather(*map(asked, texts))
            return waits

        for number in range(1, rounds + 1):
            waits = await ask_all()
            median_s = statistics.median(waits)
            lines.append(f"burst {number} | answers after {median_s:5.2f} s, the last {max(waits):5.2f} s")
    return lines


def _client(url: str, key: str = "a") -> httpx.Client:
    """A client with a new connection: llama-server closes a kept one without a word."""
    return httpx.Client(base_url=url, timeout=600, headers={"authorization": f"Bearer {key}"})


def straight(stack: ExitStack, case: str, name: str, model: str) -> Setup:
    """Servers without kvpin."""
    flags = STRAIGHT[name]
    if case == "full" and name != "--cache-ram 0":
        flags = (*flags, "--cache-ram", str(CACHE_MIB[model]))
    return alone(stack, Servers(gguf_path(model), flags, 1 + (case == "two"), None))


def alone(stack: ExitStack, servers: Servers) -> Setup:
    """Starts servers; clients ask them."""
    stack.callback(servers.stop)
    servers.start()

    def restart() -> None:
        servers.stop()
        servers.start()

    return Setup(servers.urls, servers, restart)


def through_kvpin(stack: ExitStack, case: str, model: str) -> Setup:
    """Kvpin in front of servers with a common directory."""
    memory = stack.enter_context(host_cache())
    disk = stack.enter_context(tempfile.TemporaryDirectory(dir=CACHE))
    servers = Servers(gguf_path(model), THROUGH, 1 + (case == "two"), memory)
    room = f",host_cache_bytes={CACHE_MIB[model] * MIB},disk_cache_dir={disk}" if case == "full" else ""
    keys = KEYS if case == "tenants" else {}
    return behind_kvpin(stack, servers, f"host_cache_dir={memory}{room}", **keys)


def behind_kvpin(stack: ExitStack, servers: Servers, settings: str, **environment: str) -> Setup:
    """Starts servers and a kvpin in front of them, which clients ask. `settings`: those of each engine."""
    stack.callback(servers.stop)
    servers.start()
    options = [word for server in servers.urls for word in ("--engine", f"llama_server={server},{settings}")]
    url = stack.enter_context(kvpin(*options, **environment))

    def restart() -> None:
        with _client(url) as client:
            wait_written_back(client)
            servers.stop()
            _until(client, ready=False)
            servers.start()
            _until(client, ready=True)

    return Setup([url], servers, restart)


def _until(client: httpx.Client, *, ready: bool) -> None:
    deadline = time.monotonic() + AWAY_S
    while time.monotonic() < deadline:
        engines = client.get("/admin/v1/engines").json()["engines"]
        if all((engine["state"] == "ready") is ready for engine in engines):
            return
        time.sleep(0.1)
    raise TimeoutError(
        f"kvpin does not see within {AWAY_S:.0f} s that its engines are {'ready' * ready or 'away'}"
    )


def run(case: str, name: str, model: str, rounds: int, words: int) -> list[str]:
    """The lines of one setup of one case."""
    with ExitStack() as stack:
        setup = through_kvpin(stack, case, model) if name == "kvpin" else straight(stack, case, name, model)
        if case == "burst":
            return asyncio.run(at_once(setup, rounds))
        if case != "tenants":
            return converse(setup, rounds, words, restarts=case == "restart").lines()
        converse(setup, 1, words)
        return converse(setup, rounds, words, key="b").lines()


def main() -> None:
    """Prints the lines of each setup of each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=some_of(CASES), default=CASES)
    parser.add_argument("--setups", type=some_of((*STRAIGHT, "kvpin")), default=(*STRAIGHT, "kvpin"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--model", choices=sorted(CACHE_MIB), default="tiny")
    parser.add_argument("--words", type=int, default=1000, help="of each conversation's first prompt")
    arguments = parser.parse_args()
    for case in arguments.cases:
        who = f"{REQUESTS} requests at once" if case == "burst" else f"{TALKS} conversations"
        print(f"{case}: {who}, {SLOTS} slots, {arguments.rounds} rounds", flush=True)
        for name in arguments.setups:
            for line in run(case, name, arguments.model, arguments.rounds, arguments.words):
                print(f"  {name:14} | {line}", flush=True)


if __name__ == "__main__":
    main()
