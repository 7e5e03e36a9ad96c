"""Engines that die, come back, or never were."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time

import httpx
import pytest

from tests.live.conftest import running_kvpin

pytestmark = pytest.mark.live

ENGINE = "embedded: --threads 1 --kv-blocks 256"


def messages(text):
    return {"model": "kvpin-tiny", "messages": [{"role": "user", "content": text}], "temperature": 0}


def started_pids(log):
    """Engine id → process id, of the last start."""
    found = {}
    for line in log.read_text().splitlines():
        if "managed engine started" in line:
            found[re.search(r"embedded-\d", line)[0]] = int(re.search(r'"pid": (\d+)', line)[1])
    return found


async def test_an_engine_killed_under_load_costs_no_new_request(tmp_path):
    flags = ("--managed", ENGINE, "--managed", ENGINE, "--log-format", "json")
    with running_kvpin(tmp_path / "log", *flags) as kvpin:
        async with httpx.AsyncClient(base_url=kvpin.base_url, timeout=60) as client:
            # Both engines hold something, so that both are in use.
            warm = [client.post("/chat/completions", json=messages(f"Ship {n} " * 40)) for n in range(4)]
            homes = {answer.headers["x-kvpin-engine"] for answer in await asyncio.gather(*warm)}
            victim = min(homes)
            pid = started_pids(kvpin.log)[victim]

            async def stream(number):
                body = messages(f"Story {number}.") | {"max_tokens": 200, "stream": True, "ignore_eos": True}
                try:
                    async with client.stream("POST", "/chat/completions", json=body) as answer:
                        text = b"".join([chunk async for chunk in answer.aiter_bytes()])
                        return answer.status_code, text
                except httpx.RemoteProtocolError as error:
                    return 200, f'broken: {error} "error"'.encode()

            running = [asyncio.create_task(stream(number)) for number in range(8)]
            await asyncio.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
            late = [client.post("/chat/completions", json=messages(f"Late {n}.")) for n in range(10)]
            answers = await asyncio.gather(*late)
            assert [answer.status_code for answer in answers] == [200] * 10
            for status, text in await asyncio.gather(*running):
                assert status == 200
                assert text.endswith(b"data: [DONE]\n\n") != (b'"error"' in text)

            deadline = time.monotonic() + 60
            while kvpin.engines().get(victim, {}).get("state") != "ready":
                assert time.monotonic() < deadline, kvpin.log.read_text()
                await asyncio.sleep(0.2)
            assert started_pids(kvpin.log)[victim] != pid
            # What it held is gone, and nothing is predicted from it.
            for number in range(4):
                answer = await client.post("/chat/completions", json=messages(f"Ship {number} " * 40))
                reported = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert int(answer.headers["x-kvpin-predicted-tokens"]) == reported


def test_a_stream_of_an_engine_that_hangs_ends_with_an_error(tmp_path, start_engine, monkeypatch):
    monkeypatch.setenv("KVPIN_HEALTH__TIMEOUT_S", "1")
    engine = start_engine("--kv-blocks", "256")
    body = messages("A long story.") | {"max_tokens": 3000, "stream": True, "ignore_eos": True}
    text = b""
    with (
        running_kvpin(tmp_path / "kvpin-log", "--engine", f"embedded={engine.url},id=one") as kvpin,
        httpx.stream("POST", f"{kvpin.base_url}/chat/completions", json=body, timeout=30) as answer,
    ):
        try:
            with pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012 - the loop is what breaks
                for number, chunk in enumerate(answer.iter_raw()):
                    text += chunk
                    if number == 0:
                        engine.process.send_signal(signal.SIGSTOP)
        finally:
            engine.process.send_signal(signal.SIGCONT)
        assert b"the engine was lost in mid-answer" in text
        assert "requests failed because their engine was lost" in kvpin.log.read_text()


def test_an_engine_restarted_in_place_is_another_engine(tmp_path, start_engine):
    engine = start_engine("--kv-blocks", "64")
    port = engine.url.rpartition(":")[2]
    with running_kvpin(tmp_path / "kvpin-log", "--engine", f"embedded={engine.url},id=one") as kvpin:
        body = messages("The same words. " * 20)
        httpx.post(f"{kvpin.base_url}/chat/completions", json=body, timeout=60).raise_for_status()
        engine.kill()
        gone = httpx.post(f"{kvpin.base_url}/chat/completions", json=body, timeout=60)
        assert gone.status_code in (502, 503)
        assert gone.json()["error"]["type"] == "server_error"
        start_engine("--kv-blocks", "64", "--port", port)
        deadline = time.monotonic() + 30
        while kvpin.engines().get("one", {}).get("state") != "ready":
            assert time.monotonic() < deadline, kvpin.log.read_text()
            time.sleep(0.1)
        again = httpx.post(f"{kvpin.base_url}/chat/completions", json=body, timeout=60)
        assert again.headers["x-kvpin-predicted-tokens"] == "0"
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_without_reuse_requests_alternate_and_nothing_is_predicted(tmp_path, start_engine):
    engines = [start_engine("--kv-blocks", "64") for _ in range(2)]
    flags = [word for engine in engines for word in ("--engine", f"embedded={engine.url}")]
    with running_kvpin(tmp_path / "kvpin-log", *flags, reuse=False) as kvpin:
        body = messages("The same words. " * 20)
        homes = []
        for _ in range(4):
            answer = httpx.post(f"{kvpin.base_url}/chat/completions", json=body, timeout=60)
            homes.append(answer.headers["x-kvpin-engine"])
            assert answer.headers["x-kvpin-predicted-tokens"] == "0"
        assert homes[:2] == homes[2:]
        assert len(set(homes)) == 2
        assert "--reuse turns it on" in kvpin.log.read_text()
