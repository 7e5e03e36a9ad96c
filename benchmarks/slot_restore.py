"""The time to the first token of a long prompt: cold, in a warm slot, and with its KV brought from a file.

A ~98M-parameter model on llama-servers with one thread. Each round has a document of its own of about 2,000
tokens and asks about it with at least 64 new tokens each time:

    cold                nothing of it is known anywhere
    warm slot           its slot still holds it
    restored            its slot was given to others; its KV comes from the file in memory
    on another server   the server that computed it takes no requests; another one restores it
    after a restart     kvpin and both servers were ended and started again

Everything is measured by the client, through kvpin, restore time included.

    python benchmarks/slot_restore.py [--rounds 3] [--tokens 2000]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from harness import ROOT, free_port, host_cache, kvpin, llama_server
from slots import VOCABULARY, ask

sys.path.insert(0, str(ROOT))
from scripts.make_gguf import gguf_path

SLOTS, CTX = 2, 4096
QUESTION_WORDS = 60
SETTLE_S = 60.0

Case = dict[str, list[float]]


@contextmanager
def world(directory: Path, ports: list[int]) -> Iterator[httpx.Client]:
    """Two servers that share a directory, and kvpin in front of them."""
    with ExitStack() as stack:
        options: list[str] = []
        for number, port in enumerate(ports):
            server = stack.enter_context(
                llama_server(
                    gguf_path("large"), "--cache-ram", "0",
                    slots=SLOTS, ctx=CTX, save_dir=directory, port=port,
                )
            )  # fmt: skip
            options += ["--engine", f"llama_server={server},id=server-{number},host_cache_dir={directory}"]
        url = stack.enter_context(kvpin(*options))
        limits = httpx.Limits(max_keepalive_connections=0)
        yield stack.enter_context(httpx.Client(base_url=url, timeout=600, limits=limits))


class Talk:
    """Documents and questions about them.

    Attributes:
        cases: seconds to the first token, by case.
        cached: reused tokens of each question asked, by case.
    """

    def __init__(self, tokens: int) -> None:
        self.cases: Case = {}
        self.cached: Case = {}
        self._tokens = tokens
        self._random = random.Random(11)  # noqa: S311 - the same documents each time

    def document(self) -> str:
        """A new text of about the given number of tokens."""
        return self._words(self._tokens * 2 // 3)

    def ask(self, client: httpx.Client, document: str, case: str | None) -> None:
        """Asks something new about the document."""
        messages = [{"role": "user", "content": f"{document}\n\n{self._words(QUESTION_WORDS)}"}]
        answer = ask(client, messages, {})
        if case is not None:
            self.cases.setdefault(case, []).append(answer.ttft_s)
            self.cached.setdefault(case, []).append(answer.cached)

    def overwrite(self, client: httpx.Client) -> None:
        """Sends other prompts through every slot of both servers."""
        wait_written_back(client)
        for _ in range(2 * SLOTS):
            messages = [{"role": "user", "content": self._words(40)}]
            ask(client, messages, {})

    def _words(self, count: int) -> str:
        return " ".join(self._random.choice(VOCABULARY) for _ in range(count))


def wait_written_back(client: httpx.Client) -> None:
    """Waits until kvpin has saved the slots that are worth it."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        slots = [
            slot
            for pool in client.get("/admin/v1/stats").json()["pools"]
            for engine in pool["engines"]
            for slot in engine["kv"]["slots"]
        ]
        if all(slot["operation"] is None and slot["saved"] >= slot["tokens"] * 0.9 for slot in slots):
            return
        time.sleep(0.1)


def home_of(client: httpx.Client) -> str:
    """The engine that served the last request."""
    record = client.get("/admin/v1/requests", params={"limit": 1}).json()["requests"][0]
    engine: str = record["engine"]
    return engine


def one_round(client: httpx.Client, talk: Talk) -> str:
    """Every case but the restart; returns the document."""
    document = talk.document()
    talk.ask(client, document, "cold")
    talk.ask(client, document, "warm slot")
    home = home_of(client)
    talk.overwrite(client)
    talk.ask(client, document, "restored")
    wait_written_back(client)
    client.post(f"/admin/v1/engines/{home}/drain").raise_for_status()
    talk.ask(client, document, "on another server")
    client.post(f"/admin/v1/engines/{home}/drain", json={"undo": True}).raise_for_status()
    wait_written_back(client)
    return document


def main() -> None:
    """Prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2000)
    arguments = parser.parse_args()
    talk, ports = Talk(arguments.tokens), [free_port(), free_port()]
    with host_cache() as directory:
        with world(directory, ports) as client:
            documents = [one_round(client, talk) for _ in range(arguments.rounds)]
        with world(directory, ports) as client:
            for document in documents:
                talk.ask(client, document, "after a restart")
    cold = statistics.median(talk.cases["cold"])
    for case, seconds in talk.cases.items():
        middle = statistics.median(seconds)
        print(
            f"{case:18} {middle * 1000:7.0f} ms | {cold / middle:5.1f}x | "
            f"cached {statistics.median(talk.cached[case]):.0f} | "
            f"all {[round(s * 1000) for s in seconds]}"
        )


if __name__ == "__main__":
    main()
