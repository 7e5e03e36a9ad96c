"""kvpin as its users run it: `kvpin serve` as a process, with engines it manages."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.fleet import pool
from tests.forks import Forked, start
from tests.live.answers import until
from tests.processes import address_in, answers, wait_until

READY_S = 300.0
STOP_S = 60.0
ENGINE = "embedded: --threads 1 --kv-blocks 512 --host-cache-bytes 64MiB"


@dataclass(slots=True)
class Kvpin:
    """A running proxy."""

    url: str
    process: subprocess.Popen[bytes] | Forked = field(repr=False)
    log: Path = field(repr=False)
    killed: bool = False

    def kill(self) -> None:
        """Kills it, as the kernel would that needs memory."""
        self.killed = True
        self.process.kill()
        self.process.wait(STOP_S)

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        """A request of the data plane, e.g. to `chat/completions`."""
        return httpx.post(f"{self.base_url}/{path}", json=body, timeout=120, trust_env=False, **options)

    def admin(self, method: str, path: str, **options) -> httpx.Response:
        """An admin request, as JSON."""
        return httpx.request(method, f"{self.url}/admin/v1/{path}", timeout=60, trust_env=False, **options)

    def record(self, request_id: str) -> dict[str, Any]:
        """The record of a request. It may be written after the answer's end: kvpin asks the engine for its
        token ids before, and frees its slot."""

        def written() -> dict[str, Any] | None:
            answer = self.admin("GET", f"requests/{request_id}")
            return answer.json() if answer.status_code == httpx.codes.OK else None

        return until(written, f"the record of {request_id}", self.log.read_text)

    def record_of(self, answer: httpx.Response) -> dict[str, Any]:
        """The record of an answer's request."""
        return self.record(answer.headers["x-request-id"])

    def engines(self) -> dict[str, dict]:
        """Stats of each engine, by id."""
        pools = self.admin("GET", "stats").raise_for_status().json()["pools"]
        return {engine["id"]: engine for pool in pools for engine in pool["engines"]}


@contextmanager
def running_kvpin(
    log: Path, *flags: str, reuse: bool = True, tokenised: bool = True, **started: Any
) -> Iterator[Kvpin]:
    """Starts `kvpin serve`, yields it once it is ready, ends it with SIGTERM and expects a clean exit.
    `tokenised` False: its tokenizers are not waited for. `started`: see `starting_kvpin`."""
    with starting_kvpin(log, *flags, reuse=reuse, **started) as proxy:
        wait_until_ready(proxy)
        if tokenised:
            wait_until_tokenised(proxy)
        yield proxy


@contextmanager
def starting_kvpin(
    log: Path, *flags: str, reuse: bool = True, checkout: Path | None = None, **variables: str
) -> Iterator[Kvpin]:
    """`running_kvpin`, yielded as soon as it listens. `checkout`: that of another version, with its .venv."""
    words = ("serve", "--port", "0", *flags)
    environment = {**os.environ, "ENABLE_KV_CACHE_REUSE": str(int(reuse)), **variables}
    with log.open("wb") as output:
        process: subprocess.Popen[bytes] | Forked
        if checkout is None:
            process = start("proxy.cli", *words, output=output, environment=environment)
        else:
            python = str(checkout / ".venv/bin/python")
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", python, "-m", "proxy.cli", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=checkout,
            )
    proxy = Kvpin("", process, log)
    try:
        wait_until_it_listens(proxy)
        yield proxy
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0 or proxy.killed, log.read_text()
    finally:
        process.kill()
        process.wait(STOP_S)


def wait_until_it_listens(proxy: Kvpin) -> None:
    """Returns once it listens, and `proxy` knows its address."""
    named = lambda: address_in(proxy.log, r"base_url +(\S+)/v1\n")  # noqa: E731 - short
    proxy.url = wait_until(named, proxy.process, proxy.log, READY_S)


def wait_until_ready(proxy: Kvpin) -> None:
    """Returns once it listens and serves."""
    wait_until_it_listens(proxy)
    wait_until(lambda: answers(f"{proxy.url}/health/ready"), proxy.process, proxy.log, READY_S)


def wait_until_tokenised(proxy: Kvpin, pools: int = 0) -> None:
    """Returns once there are so many pools, and every tokenizer is loaded and checked; at once where stats
    need a key."""

    def is_tokenised() -> bool:
        found = proxy.admin("GET", "stats").json().get("pools")
        details = [pool["tokenisation"]["detail"] for pool in found or ()]
        is_there = found is None or len(found) >= pools
        return is_there and not any("being loaded" in each or "not checked" in each for each in details)

    wait_until(is_tokenised, proxy.process, proxy.log, READY_S)


@pytest.fixture
def nothing_lingers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request is about to leave behind counts until it ends, and here no longer."""
    monkeypatch.setattr(pool, "PENDING_LINGER_S", 0.0)


@pytest.fixture(scope="session")
def kvpin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kvpin]:
    """One proxy with two engines for the whole session. Tests share its caches: use unique prompts."""
    log = tmp_path_factory.mktemp("kvpin") / "log"
    with running_kvpin(log, "--managed", ENGINE, "--managed", ENGINE) as proxy:
        yield proxy
