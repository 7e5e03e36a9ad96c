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
from dataclasses import dataclass, field

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from proxy.http.listeners import listen
from tests.fakes import serving
from tests.live.answers import becomes

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
            self._over = False
            self._tasks = [group.create_task(self._client(number)) for number in range(clients)]
            try:
                yield
            finally:
                await self.over()

    async def over(self) -> None:
        """Waits for the last answers."""
        self._over = True
        await asyncio.wait(self._tasks, timeout=120)

    async def more(self, answers: int = 40) -> None:
        """Waits for that many more answers."""
        enough = self.answers + answers
        async with asyncio.timeout(120):
            while self.answers < enough and not self.failures:  # noqa: ASYNC110 - a test
                await asyncio.sleep(0.02)

    async def _client(self, number: int) -> None:
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


async def logged(log, text):
    """Returns once a kvpin has written this to its log."""
    await becomes(lambda: text in log.read_text())


@contextlib.asynccontextmanager
async def kvpin_on(listener: socket.socket, log, *flags: str):
    """A kvpin, once its engine is ready; killed at the end."""
    process = start(listener, log, *flags)
    try:
        await logged(log, "engine is ready")
        yield process
    finally:
        process.kill()
        process.wait()


async def ended(process, log):
    """Tells a kvpin to stop, and waits until it has."""
    process.send_signal(signal.SIGTERM)
    await becomes(lambda: process.poll() is not None)
    assert process.returncode == 0, log.read_text()


@pytest.fixture
def listener():
    with listen("127.0.0.1", 0) as listener:
        yield listener


@pytest.fixture
def url(listener):
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
async def engine():
    """The address of an engine that answers at once."""
    async with serving(ENGINE) as url:
        yield url


async def test_two_kvpins_on_one_socket_follow_each_other_without_a_failed_request(
    tmp_path, engine, listener, url
):
    flags, load = ("--engine", f"openai_compatible={engine},id=e"), Load(url)
    logs = [tmp_path / f"log-{number}" for number in range(3)]
    async with kvpin_on(listener, logs[0], *flags) as first, load.running():
        await load.more()
        async with kvpin_on(listener, logs[1], *flags) as second:
            await load.more()
            await ended(first, logs[0])
            await load.more()
            # Alone, without a sibling: what comes meanwhile waits in the socket's queue.
            await ended(second, logs[1])
            async with kvpin_on(listener, logs[2], *flags):
                await load.more()
                await load.over()
    assert load.failures == []


async def reload_ok(url):
    async with httpx.AsyncClient(trust_env=False) as client:
        page = await client.get(f"{url}/metrics", headers={"authorization": "Bearer the-metrics-key"})
    return float(re.search(r"^kvpin_reload_ok (\S+)$", page.text, re.MULTILINE)[1])


async def test_new_settings_under_load(tmp_path, engine, listener, url, monkeypatch):
    config, log = tmp_path / "kvpin.toml", tmp_path / "log"
    first, other = (
        f'[[engines]]\nkind = "openai_compatible"\nurl = "{engine}"\n'
        f'id = "{name}"\nheaders = {{ x-to = "{name}" }}\n'
        for name in ("one", "two")
    )
    old, new = '[[api_keys]]\nkey = "k"\ntenant = "t"\n', '[[api_keys]]\nkey = "new"\ntenant = "t"\n'
    config.write_text(first + old)
    monkeypatch.setenv("KVPIN_METRICS_KEY", "the-metrics-key")
    load, rotated, late = Load(url), Load(url, key="new"), Load(url)
    async with kvpin_on(listener, log, "--config", str(config)) as process:

        async def reload(text, said):
            before = log.read_text().count(said)
            config.write_text(text)
            process.send_signal(signal.SIGHUP)
            await becomes(lambda: log.read_text().count(said) > before)

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
            await logged(log, "engine has left")
            rotated.engines.clear()
            await rotated.more()
            assert rotated.engines == {"two"}
        assert load.failures + rotated.failures == []
        async with late.running(clients=1):
            await late.more(1)
        assert late.failures[0].startswith("401 ")
        await ended(process, log)
    assert '"exception"' not in log.read_text()


@pytest.mark.parametrize("workers", [1, 2])
async def test_other_command_lines_under_load(tmp_path, listener, url, workers):
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
    load = Load(url)
    async with kvpin_on(listener, log, "--config", str(config)) as process:
        await becomes(lambda: ready() == 2 * workers)
        async with load.running(clients=2):
            await load.more(10)
            engines(256)
            process.send_signal(signal.SIGHUP)
            await becomes(lambda: load.failures or ready() == 4 * workers)
            await load.more(10)
        assert load.failures == []
        await ended(process, log)
    assert '"exception"' not in log.read_text()


async def test_a_client_that_pauses_between_two_requests_is_not_cut_off(tmp_path, engine, listener, url):
    log = tmp_path / "log"
    async with kvpin_on(listener, log, "--engine", f"openai_compatible={engine}") as process:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            assert (await client.get("/health/live")).status_code == 200
            process.send_signal(signal.SIGTERM)
            await logged(log, "waiting for running answers")
            await asyncio.sleep(0.6)
            answer = await client.get("/health/live")  # the port is closed: on the same connection
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        await ended(process, log)


async def test_until_requests_stop_coming_kvpin_says_that_it_is_not_ready(tmp_path, engine, listener, url):
    config, log, load = tmp_path / "kvpin.toml", tmp_path / "log", Load(url)
    config.write_text("drain_s = 60\n")
    flags = ("--config", str(config), "--engine", f"openai_compatible={engine}")
    async with kvpin_on(listener, log, *flags) as process:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client, load.running(clients=2):
            await load.more(5)
            assert (await client.get("/health/ready")).status_code == 200
            process.send_signal(signal.SIGTERM)
            await logged(log, "still accepting requests")
            for path, status in (("/health/ready", 503), ("/health", 503), ("/health/live", 200)):
                answer = await client.get(path)
                assert (answer.status_code, answer.headers["connection"]) == (status, "close")
            await load.more(10)
        assert load.failures == []
        await ended(process, log)  # told again: no need to wait for the rest of the 60 s
