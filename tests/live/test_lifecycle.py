"""How kvpin and its engines start and end: told to stop, killed, under load, frozen, or never healthy."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.live.answers import until
from tests.live.conftest import Kvpin, running_kvpin

pytestmark = pytest.mark.live

ENGINE = "embedded: --threads 1 --kv-blocks 256"
MANAGED = ("--managed", ENGINE, "--log-format", "json")


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


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


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


async def test_answers_longer_than_the_grace_are_cut_short(tmp_path):
    config = tmp_path / "kvpin.toml"
    config.write_text("graceful_shutdown_s = 1\n")
    with running_kvpin(tmp_path / "log", "--config", str(config), *MANAGED) as kvpin:
        (pid,), begun = engine_pids(kvpin).values(), asyncio.Event()
        async with httpx.AsyncClient(base_url=kvpin.base_url, timeout=60) as client:
            stream = asyncio.create_task(read_stream(client, 1, 3900, begun))
            await begun.wait()
            kvpin.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.5)
            async with httpx.AsyncClient(base_url=kvpin.base_url) as late:
                with pytest.raises(httpx.ConnectError):
                    await late.get("/models")
            text = await stream
        assert not text.endswith(b"data: [DONE]\n\n")
        assert b"broken: " in text
        assert kvpin.process.wait(30) == 0
        assert not is_running(pid)
    assert "Exception in ASGI" not in kvpin.log.read_text()


def test_an_address_that_cannot_be_listened_on_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for host, port, said in (
            ("127.0.0.1", taken.getsockname()[1], "; use another --port"),
            (
                "192.0.2.1",
                8000,
                "; --host must name an address of this machine",
            ),
        ):
            command = [sys.executable, "-m", "proxy.cli", "serve", f"--host={host}", f"--port={port}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr.startswith(f"kvpin: cannot listen on {host}:{port}: ")
            assert done.stderr.endswith(f"{said}\n")
            assert done.stderr.count("\n") == 1


def test_an_engine_that_never_starts_does_not_keep_the_others_from_serving(tmp_path):
    broken = "embedded: --model /nowhere/at/all --threads 1"
    with running_kvpin(tmp_path / "log", "--managed", broken, *MANAGED) as kvpin:
        for number in range(4):
            answer = kvpin.post("chat/completions", chat(f"Ship {number}."))
            assert answer.status_code == 200
            assert answer.headers["x-kvpin-engine"] == "embedded-1"
        until(lambda: "managed engine given up" in kvpin.log.read_text())
        unconnected = kvpin.admin("GET", "stats").json()["unconnected"]
        assert [engine["id"] for engine in unconnected] == ["embedded-0"]
