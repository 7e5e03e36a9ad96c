"""How kvpin and its engines start and end: told to stop, killed, under load, frozen, or never healthy."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from tests.forks import start
from tests.live.answers import becomes, until
from tests.live.conftest import Kvpin, running_kvpin, starting_kvpin
from tests.processes import is_alive

pytestmark = pytest.mark.live

ENGINE = "embedded: --threads 1 --kv-blocks 256"
MANAGED = ("--managed", ENGINE, "--log-format", "json")
TWO = ("--managed", ENGINE, *MANAGED)


def chat(text, **fields):
    return {
        "model": "kvpin-tiny",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 4,
        **fields,
    }


def engine_pids(kvpin: Kvpin) -> dict[str, int]:
    """Engine id → process id of its last start."""
    lines = re.findall(
        r'"engine": "([^"]+)".*?"pid": (\d+), "event": "managed engine started"', kvpin.log.read_text()
    )
    return {name: int(pid) for name, pid in lines}


async def read_stream(client, number, tokens, begun):
    body = chat(f"Story {number}.", max_tokens=tokens, stream=True, ignore_eos=True)
    text = b""
    try:
        async with client.stream("POST", "/chat/completions", json=body) as answer:
            async for chunk in answer.aiter_bytes():
                begun.set()
                text += chunk
    except httpx.RemoteProtocolError as error:
        text += f"broken: {error}".encode()
    return text


async def terminated_during_streams(kvpin, tokens):
    """The output of three streams that run while kvpin is told to stop."""
    async with httpx.AsyncClient(base_url=kvpin.base_url, timeout=60) as client:
        begun = [asyncio.Event() for _ in range(3)]
        streams = [
            asyncio.create_task(read_stream(client, number, tokens, event))
            for number, event in enumerate(begun)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        kvpin.process.send_signal(signal.SIGTERM)
        await becomes(lambda: "waiting for running answers" in kvpin.log.read_text())
        async with httpx.AsyncClient(base_url=kvpin.base_url) as late:
            with pytest.raises(httpx.ConnectError):
                await late.get("/models")
        return await asyncio.gather(*streams)


async def test_running_answers_finish_before_kvpin_stops(tmp_path):
    with running_kvpin(tmp_path / "log", *MANAGED) as kvpin:
        (pid,) = engine_pids(kvpin).values()
        for text in await terminated_during_streams(kvpin, tokens=150):
            assert text.endswith(b"data: [DONE]\n\n")
        assert kvpin.process.wait(30) == 0
        assert not is_alive(pid)
    assert '"level": "error"' not in kvpin.log.read_text()


async def test_answers_longer_than_the_grace_are_cut_short(tmp_path):
    config = tmp_path / "kvpin.toml"
    config.write_text("graceful_shutdown_s = 1\n")
    with running_kvpin(tmp_path / "log", "--config", str(config), *MANAGED) as kvpin:
        (pid,) = engine_pids(kvpin).values()
        for text in await terminated_during_streams(kvpin, tokens=3900):
            assert not text.endswith(b"data: [DONE]\n\n")
            assert b"broken: " in text
        assert kvpin.process.wait(30) == 0
        assert not is_alive(pid)
    assert "Exception in ASGI" not in kvpin.log.read_text()


def test_engines_end_with_a_kvpin_that_is_killed(tmp_path):
    with starting_kvpin(tmp_path / "log", *MANAGED) as kvpin:
        (pid,) = until(lambda: engine_pids(kvpin)).values()
        assert is_alive(pid)
        kvpin.kill()
        until(lambda: not is_alive(pid))


def test_told_to_stop_while_engines_start(tmp_path):
    with starting_kvpin(tmp_path / "log", *MANAGED) as kvpin:
        (pid,) = until(lambda: engine_pids(kvpin)).values()
        kvpin.process.terminate()
        assert kvpin.process.wait(30) == 0
        assert not is_alive(pid)


def test_a_reload_that_is_asked_for_while_it_starts(tmp_path):
    config, log = tmp_path / "config", tmp_path / "log"
    os.mkfifo(config)
    command = ["serve", "--port", "0", "--log-format", "json", "--config", str(config)]
    with log.open("wb") as output:
        kvpin = start("proxy.cli", *command, output=output)
    try:
        with config.open("w") as settings:  # kvpin waits for them
            kvpin.send_signal(signal.SIGHUP)
            (tmp_path / "new").write_text("engines = []\n[[api_keys]]\nkey = 'new'\n")
            (tmp_path / "new").replace(config)
            settings.write("engines = []\n")
        (line,) = until(lambda: re.findall(".*settings reloaded.*", log.read_text()))
        assert '"api_keys": 1' in line
        kvpin.terminate()
        assert kvpin.wait(30) == 0
    finally:
        kvpin.kill()


def test_a_port_in_use_is_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "proxy.cli", "serve", "--port", str(port), "--managed", ENGINE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert (
        done.stderr
        == f"kvpin: cannot listen on 127.0.0.1:{port}: Address already in use; use another --port\n"
    )
    assert not done.stdout


def test_an_address_of_another_machine_is_one_line():
    command = [sys.executable, "-m", "proxy.cli", "serve", "--host", "192.0.2.1", "--managed", ENGINE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("; --host must name an address of this machine\n")


def test_an_engine_that_never_starts_does_not_keep_the_others_from_serving(tmp_path):
    broken = "embedded: --model /nowhere/at/all --threads 1"
    with running_kvpin(tmp_path / "log", "--managed", broken, *MANAGED) as kvpin:
        for number in range(4):
            answer = kvpin.post("chat/completions", chat(f"Ship {number}."))
            assert answer.status_code == 200
            assert answer.headers["x-kvpin-engine"] == "embedded-1"
        until(lambda: "managed engine given up" in kvpin.log.read_text())
        log = kvpin.log.read_text()
        assert "/nowhere/at/all" in log
        assert re.search(r'"engine": "embedded-0", "error": .*"exit_code": 2, "starts": 1', log)
        unconnected = kvpin.admin("GET", "stats").json()["unconnected"]
        assert [engine["id"] for engine in unconnected] == ["embedded-0"]


async def test_an_engine_killed_under_load_costs_no_new_request(tmp_path):
    with running_kvpin(tmp_path / "log", *TWO) as kvpin:
        async with httpx.AsyncClient(base_url=kvpin.base_url, timeout=60) as client:

            async def ask(text):
                return await client.post("/chat/completions", json=chat(text))

            # Both engines hold something, so that both are in use.
            warm = await asyncio.gather(*(ask(f"Ship {n} " * 40) for n in range(4)))
            victim = min(answer.headers["x-kvpin-engine"] for answer in warm)
            pid, begun = engine_pids(kvpin)[victim], asyncio.Event()
            running = [asyncio.create_task(read_stream(client, n, 200, begun)) for n in range(8)]
            await begun.wait()
            os.kill(pid, signal.SIGKILL)
            answers = await asyncio.gather(*(ask(f"Late {n}.") for n in range(10)))
            assert [answer.status_code for answer in answers] == [200] * 10
            for text in await asyncio.gather(*running):
                assert text.endswith(b"data: [DONE]\n\n") != (b'"error"' in text or b"broken: " in text)
            until(lambda: engine_pids(kvpin)[victim] != pid)
            until(lambda: kvpin.engines().get(victim, {}).get("state") == "ready")
            for number in range(4):  # what it held is gone, and nothing is predicted from it
                answer = await ask(f"Ship {number} " * 40)
                reported = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert int(answer.headers["x-kvpin-predicted-tokens"]) == reported


async def test_a_frozen_engine_is_left_alone_until_it_thaws(tmp_path):
    config = tmp_path / "kvpin.toml"
    config.write_text("[health]\ninterval_s = 0.5\ntimeout_s = 3\n")
    with running_kvpin(tmp_path / "log", "--config", str(config), *TWO) as kvpin:
        async with httpx.AsyncClient(base_url=kvpin.base_url, timeout=60) as client:

            async def ask(text):
                answer = await client.post("/chat/completions", json=chat(text))
                assert answer.status_code == 200, answer.text
                return answer

            first = await ask("A long tale of the sea. " * 40)
            home = first.headers["x-kvpin-engine"]
            pid = engine_pids(kvpin)[home]
            os.kill(pid, signal.SIGSTOP)
            try:
                # kvpin sends these to the frozen engine, and to the other one once it gives the first up.
                answers = await asyncio.gather(*(ask("A long tale of the sea. " * 40) for _ in range(4)))
                assert home not in {answer.headers["x-kvpin-engine"] for answer in answers}
                assert {answer.json()["choices"][0]["message"]["content"] for answer in answers} == {
                    first.json()["choices"][0]["message"]["content"]
                }
            finally:
                os.kill(pid, signal.SIGCONT)
            until(lambda: kvpin.engines().get(home, {}).get("state") == "ready")
            assert engine_pids(kvpin)[home] == pid
            until(lambda: kvpin.engines()[home]["trust"] == "precise")
            until(lambda: (e := kvpin.engines()[home])["blocks"]["gpu"] == e["kv"]["gpu"]["cached"] > 10)
            target = {**chat("A long tale of the sea. " * 40), "path": "/v1/chat/completions"}
            route = kvpin.admin("POST", "route", json=target).json()
            cached = {candidate["engine"]: candidate["cached_tokens"] for candidate in route["candidates"]}
            assert cached[home] > 100
