"""kvpin is stopped, followed by another, and given new settings, while clients go on sending requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from proxy.http.listeners import listen
from tests.fakes import serving

pytestmark = pytest.mark.live


async def models(_request):
    return JSONResponse({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x"}]})


async def chat(request):
    if not (await request.json())["stream"]:
        await asyncio.sleep(0.02)
        return JSONResponse({"choices": [{"message": {"role": "assistant", "content": "x"}}]})

    async def events():
        for _ in range(3):
            await asyncio.sleep(0.02)
            yield b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


ENGINE = Starlette(
    routes=[Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])]
)
# `systemd-socket-activate` in one line: the socket is descriptor 3, and the variables name this process.
ACTIVATE = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); "
    "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1'); "
    "os.execv(sys.executable, [sys.executable, '-m', 'proxy.cli', 'serve', *sys.argv[2:]])"
)


def start(listener: socket.socket, log, *flags: str) -> subprocess.Popen[bytes]:
    """A kvpin on a socket that it does not own."""
    command = [sys.executable, "-c", ACTIVATE, str(listener.fileno()), *flags, "--log-format", "json"]
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            pass_fds=[listener.fileno()],
            env={**os.environ, "ENABLE_KV_CACHE_REUSE": "1"},
        )


@dataclass
class Load:
    """Clients that send one request after the other over kept-alive connections."""

    url: str
    key: str = "k"
    answers: int = 0
    engines: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def running(self, clients: int = 8):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._client(number)) for number in range(clients)]
            try:
                yield
            finally:
                self._over = True
                await asyncio.wait(tasks, timeout=120)

    async def more(self, answers: int = 40) -> None:
        """Waits for that many more answers."""
        enough = self.answers + answers
        async with asyncio.timeout(120):
            while self.answers < enough and not self.failures:  # noqa: ASYNC110 - a test
                await asyncio.sleep(0.02)

    async def _client(self, number: int) -> None:
        self._over = False
        async with httpx.AsyncClient(base_url=self.url, timeout=120, trust_env=False) as client:
            turn = 0
            while not self._over:
                turn += 1
                await self._ask(client, f"Client {number} asks {turn}.", streams=turn % 2 == 0)

    async def _ask(self, client, text, *, streams):
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": text}],
            "stream": streams,
            "max_tokens": 4,
        }
        headers = {"authorization": f"Bearer {self.key}"}
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
                content = await answer.aread()
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
            return
        if answer.status_code != 200 or (streams and not content.endswith(b"data: [DONE]\n\n")):
            self.failures.append(f"{answer.status_code} {content[-200:]!r}")
        self.answers += 1
        self.engines.add(answer.headers.get("x-kvpin-engine", ""))


async def until(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def ended(process, log):
    """The exit status of a process that was told to stop."""
    await until(lambda: process.poll() is not None)
    assert process.returncode == 0, log.read_text()


@contextlib.contextmanager
def killed_at_the_end(processes):
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture
async def engine():
    """The address of an engine that answers at once."""
    async with serving(ENGINE) as url:
        yield url


async def test_two_kvpins_on_one_socket_follow_each_other_without_a_failed_request(tmp_path, engine):
    engine = f"openai_compatible={engine},id=e"
    with listen("127.0.0.1", 0) as listener:
        load, processes = Load(f"http://127.0.0.1:{listener.getsockname()[1]}"), []
        with killed_at_the_end(processes):
            for number in range(2):
                log = tmp_path / f"log-{number}"
                processes.append(start(listener, log, "--engine", engine))
                await until(lambda: "engine is ready" in log.read_text())  # noqa: B023 - used at once
                if number == 0:
                    running = contextlib.AsyncExitStack()
                    await running.enter_async_context(load.running())
                await load.more()
                if number:
                    processes[-2].send_signal(signal.SIGTERM)
                    await ended(processes[-2], tmp_path / f"log-{number - 1}")
                    await load.more()
            # Alone, without a sibling: what comes meanwhile waits in the socket's queue.
            processes[-1].send_signal(signal.SIGTERM)
            await ended(processes[-1], log)
            processes.append(start(listener, tmp_path / "log-last", "--engine", engine))
            await load.more()
            await running.aclose()
        assert load.failures == []


async def reload_ok(url):
    async with httpx.AsyncClient(trust_env=False) as client:
        page = await client.get(f"{url}/metrics", headers={"authorization": "Bearer the-metrics-key"})
    return float(re.search(r"^kvpin_reload_ok (\S+)$", page.text, re.MULTILINE)[1])


async def test_new_settings_under_load(tmp_path, engine, monkeypatch):
    config, log = tmp_path / "kvpin.toml", tmp_path / "log"
    first, other = (
        f'[[engines]]\nkind = "openai_compatible"\nurl = "{engine}"\n'
        f'id = "{name}"\nheaders = {{ x-to = "{name}" }}\n'
        for name in ("one", "two")
    )
    old, new = '[[api_keys]]\nkey = "k"\ntenant = "t"\n', '[[api_keys]]\nkey = "new"\ntenant = "t"\n'
    config.write_text(first + old)
    monkeypatch.setenv("KVPIN_METRICS_KEY", "the-metrics-key")
    with listen("127.0.0.1", 0) as listener:
        process = start(listener, log, "--config", str(config))
        with killed_at_the_end([process]):

            async def reload(text, said):
                before = log.read_text().count(said)
                config.write_text(text)
                process.send_signal(signal.SIGHUP)
                await until(lambda: log.read_text().count(said) > before)

            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            load, rotated = Load(url), Load(url, key="new")
            await until(lambda: "engine is ready" in log.read_text())
            async with load.running():
                await load.more()
                await reload(first + other + old + new, "settings reloaded")
                await load.more()
                for refused in ("engines = 7", "", (first + other + old)[:20], first + other):
                    await reload(refused, "settings not reloaded: the old ones stay")
                    await load.more()
                    assert load.engines == {"one", "two"}
                    assert await reload_ok(url) == 0
                await reload(first + other + old + new, "settings reloaded")
                assert await reload_ok(url) == 1
            async with rotated.running():
                await rotated.more()
                await reload(other + new, "settings reloaded")
                await until(lambda: "engine has left" in log.read_text())
                rotated.engines.clear()
                await rotated.more()
                assert rotated.engines == {"two"}
            assert load.failures + rotated.failures == []
            late = Load(url)
            async with late.running(clients=1):
                await late.more(1)
            assert late.failures[0].startswith("401 ")
            process.send_signal(signal.SIGTERM)
            await ended(process, log)
    assert '"exception"' not in log.read_text()


@pytest.mark.parametrize("workers", [1, 2])
async def test_other_command_lines_under_load(tmp_path, workers):
    config, log = tmp_path / "kvpin.toml", tmp_path / "log"
    flags = "--threads 1 --served-model-name m"

    def engines(blocks):
        config.write_text(
            f"workers = {workers}\ngraceful_shutdown_s = 3\n"
            + 2 * f'[[managed]]\nkind = "embedded"\ncommand = "{flags} --kv-blocks {blocks}"\n'
        )

    def ready():
        return log.read_text().count('"engine is ready"')

    engines(512)
    with listen("127.0.0.1", 0) as listener:
        process = start(listener, log, "--config", str(config))
        with killed_at_the_end([process]):
            await until(lambda: ready() == 2 * workers)
            load = Load(f"http://127.0.0.1:{listener.getsockname()[1]}")
            async with load.running(clients=2):
                await load.more(10)
                engines(256)
                process.send_signal(signal.SIGHUP)
                await until(lambda: load.failures or ready() == 4 * workers)
                await load.more(10)
            assert load.failures == []
            process.send_signal(signal.SIGTERM)
            await ended(process, log)
    assert '"exception"' not in log.read_text()


async def test_a_client_that_pauses_between_two_requests_is_not_cut_off(tmp_path, engine):
    log = tmp_path / "log"
    with listen("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        process = start(listener, log, "--engine", f"openai_compatible={engine}")
        with killed_at_the_end([process]):
            await until(lambda: "engine is ready" in log.read_text())
            async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
                assert (await client.get("/health/live")).status_code == 200
                process.send_signal(signal.SIGTERM)
                await until(lambda: "waiting for running answers" in log.read_text())
                await asyncio.sleep(0.6)
                answer = await client.get("/health/live")  # the port is closed: on the same connection
                assert (answer.status_code, answer.headers["connection"]) == (200, "close")
            await ended(process, log)


async def test_until_requests_stop_coming_kvpin_says_that_it_is_not_ready(tmp_path, engine):
    config, log = tmp_path / "kvpin.toml", tmp_path / "log"
    config.write_text("drain_s = 60\n")
    with listen("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        process = start(listener, log, "--config", str(config), "--engine", f"openai_compatible={engine}")
        load = Load(url)
        with killed_at_the_end([process]):
            await until(lambda: "engine is ready" in log.read_text())
            async with httpx.AsyncClient(base_url=url, trust_env=False) as client, load.running(clients=2):
                await load.more(5)
                assert (await client.get("/health/ready")).status_code == 200
                process.send_signal(signal.SIGTERM)
                await until(lambda: "still accepting requests" in log.read_text())
                for path, status in (("/health/ready", 503), ("/health", 503), ("/health/live", 200)):
                    answer = await client.get(path)
                    assert (answer.status_code, answer.headers["connection"]) == (status, "close")
                await load.more(10)
            assert load.failures == []
            process.send_signal(signal.SIGTERM)  # no need to wait for the rest of the 60 s
            await ended(process, log)
