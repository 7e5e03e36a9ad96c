"""An engine that is much slower than the others of its pool, without failing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
import time

import httpx
import pytest

from tests.live.conftest import running_kvpin

pytestmark = pytest.mark.live

ENGINE = "embedded: --threads 1 --kv-blocks 1024"
# Streams that each engine must have answered before its pace is known, and some for chance.
UNTIL_KNOWN = 48
RUNS_S = 0.01


@contextlib.contextmanager
def slowed(pid):
    """Lets a process run for a tenth of the time."""
    over = threading.Event()

    def halt_and_run():
        began = time.monotonic()
        while not over.wait(RUNS_S):
            os.kill(pid, signal.SIGSTOP)
            over.wait(9 * (time.monotonic() - began))  # it may have run longer than that
            os.kill(pid, signal.SIGCONT)
            began = time.monotonic()

    thread = threading.Thread(target=halt_and_run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


async def test_it_gets_little_as_soon_as_it_is_known(tmp_path):
    flags = ("--managed", ENGINE, "--managed", ENGINE, "--log-format", "json")
    with running_kvpin(tmp_path / "log", *flags) as kvpin:
        pids = dict(re.findall(r'"engine": "(embedded-\d)".*?"pid": (\d+)', kvpin.log.read_text()))
        async with httpx.AsyncClient(base_url=kvpin.base_url, timeout=120) as client:

            async def ask(number):
                body = {"model": "kvpin-tiny", "prompt": [number, *range(150)], "max_tokens": 1}
                answer = await client.post("/completions", json={**body, "stream": True})
                return answer.headers["x-kvpin-engine"]

            with slowed(int(pids["embedded-1"])):
                first = []
                for number in range(0, UNTIL_KNOWN, 2):
                    first += await asyncio.gather(ask(number), ask(number + 1))
                used = [await ask(UNTIL_KNOWN + number) for number in range(16)]
        assert "embedded-1" in first
        assert used.count("embedded-1") <= 4
