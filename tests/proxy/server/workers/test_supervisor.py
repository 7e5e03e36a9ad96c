"""`kvpin serve --workers 2` as processes, in front of engines without KV events."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.fakes import DONE, FakeEngine, answer, event
from tests.kv_world import tokens
from tests.live.conftest import running_kvpin, starting_kvpin

pytestmark = pytest.mark.live
COMPLETION = {"model": "m", "prompt": tokens(400), "max_tokens": 1}
STREAM = {"model": "m", "prompt": tokens(40), "max_tokens": 1, "stream": True}


class Gated(FakeEngine):
    """Ends its streams when `gate` opens."""

    def __init__(self, engine_id):
        super().__init__(engine_id, self.serve)
        self.gate = asyncio.Event()
        self.streams = 0

    async def serve(self, exchange):
        if not (exchange.body and exchange.json.get("stream")):
            await answer(exchange)
            return
        await exchange.start()
        await exchange.chunk(event({"choices": [{"text": "x"}]}))
        self.streams += 1
        await self.gate.wait()
        await exchange.chunk(DONE)
        await exchange.end()


async def started(stack, process):
    """A kvpin that starts in another thread, until the stack is left."""
    kvpin = await asyncio.to_thread(process.__enter__)
    stack.push_async_exit(lambda *error: asyncio.to_thread(process.__exit__, *error))
    return kvpin


def of_two_workers(tmp_path):
    return tmp_path / "log", "--workers", "2", "--log-format", "json"


@contextlib.asynccontextmanager
async def two_workers(tmp_path):
    """Two engines and a kvpin with two workers, which all serve."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Gated(name)) for name in ("a", "b")]
        named = [f"--engine=openai-compatible={engine.url},id={engine.id}" for engine in engines]
        process = running_kvpin(*of_two_workers(tmp_path), *named, tokenised=False)
        kvpin = await started(stack, process)
        await until_all_serve(kvpin)
        yield kvpin, engines


@contextlib.asynccontextmanager
async def two_workers_that_start(tmp_path, serve):
    """A kvpin with two workers in front of one engine that answers so: it may not be ready yet."""
    async with FakeEngine("a", serve) as engine, contextlib.AsyncExitStack() as stack:
        named = f"--engine=openai-compatible={engine.url},id=a"
        yield await started(stack, starting_kvpin(*of_two_workers(tmp_path), named))


async def ask(kvpin, path="/v1/completions", body=COMPLETION):
    """An answer over a connection of its own."""
    async with httpx.AsyncClient(base_url=kvpin.url, timeout=60, trust_env=False) as client:
        return await (client.get(path) if body is None else client.post(path, json=body))


def logged(kvpin, event):
    lines = kvpin.log.read_text().splitlines()
    entries = [json.loads(line) for line in lines if line.startswith("{")]
    return [entry for entry in entries if entry["event"] == event]


async def until(is_true):
    async with asyncio.timeout(60):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def pids(kvpin):
    """The process of each worker, the last that was started."""
    return {entry["worker"]: entry["pid"] for entry in logged(kvpin, "worker started")}


async def until_all_serve(kvpin):
    """Waits until each worker takes connections."""

    def do_serve():
        serving = {entry["pid"] for entry in logged(kvpin, "connections are accepted")}
        return serving.issuperset(pids(kvpin).values())

    await until(do_serve)


def running():
    """The processes of this machine."""
    return {int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()}


def is_left_in(directory):
    return any(Path(directory).iterdir())


LOCAL, REMOTE = 1, 2


def holder(kvpin, port, end=REMOTE):
    """The worker with a connection that has that port at one end; None if no worker has it."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {row[9] for row in rows if row[end].endswith(f":{port:04X}")}
    for worker, pid in pids(kvpin).items():
        links = set[str]()
        with contextlib.suppress(FileNotFoundError):
            for each in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                    links.add(str(each.readlink()))
        if any(f"socket:[{inode}]" in links for inode in inodes):
            return worker
    return None


async def stream(stack, kvpin):
    """A stream that has begun on a connection of its own: its reader, and its worker."""
    address = urlsplit(kvpin.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    stack.callback(writer.close)
    body = json.dumps(STREAM).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    await reader.readuntil(b'"x"')
    return reader, holder(kvpin, writer.get_extra_info("sockname")[1])


async def client_of(stack, kvpin, worker):
    """A client whose connection that worker has."""
    while True:
        client = httpx.AsyncClient(base_url=kvpin.url, timeout=60, trust_env=False)
        await stack.enter_async_context(client)
        stream = (await client.get("/health/live")).extensions["network_stream"]
        if holder(kvpin, stream.get_extra_info("client_addr")[1]) == worker:
            return client


async def check_that_both_answer_as_one(kvpin):
    """The requests of both workers are listed, whichever worker is asked."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [await client_of(stack, kvpin, worker) for worker in (1, 2)]
        for name, client in zip(("r1", "r2"), clients, strict=True):
            await client.post("/v1/completions", json=COMPLETION, headers={"x-request-id": name})
        for client in clients:
            listed = (await client.get("/admin/v1/requests?limit=2")).json()["requests"]
            assert [each["client_request_id"] for each in listed] == ["r2", "r1"]


async def test_workers_serve_one_port_and_come_back_when_killed(tmp_path, monkeypatch):
    async with contextlib.AsyncExitStack() as stack:
        # A socket's path is short, and tmp_path may be long.
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpin-test-"))
        monkeypatch.setenv("TMPDIR", temporary)
        kvpin, engines = await stack.enter_async_context(two_workers(tmp_path))
        streams = []
        while {worker for _, worker in streams} != {1, 2}:
            streams.append(await stream(stack, kvpin))
        old = pids(kvpin)
        os.kill(old[1], signal.SIGKILL)
        statuses = []
        while pids(kvpin)[1] == old[1] or len(statuses) < 20:
            statuses.append((await ask(kvpin)).status_code)
        assert set(statuses) == {200}
        for engine in engines:
            engine.gate.set()
        for reader, worker in streams:
            assert (DONE.strip() in await reader.read()) is (worker == 2)
        (ended,) = logged(kvpin, "worker ended; it is started again")
        assert (ended["worker"], ended["error"]) == (1, "ended by signal 9 (Killed)")
        for engine in engines:
            engine.gate.clear()
        await until_all_serve(kvpin)
        while (last := await stream(stack, kvpin))[1] != 1:  # those that stay open fill worker 2
            pass
        await check_that_both_answer_as_one(kvpin)
        kvpin.process.send_signal(signal.SIGHUP)
        await until(lambda: {each["worker"] for each in logged(kvpin, "settings reloaded")} == {1, 2})

        kvpin.process.send_signal(signal.SIGTERM)
        await until(lambda: len(logged(kvpin, "stopping: waiting for running answers")) == 2)
        for engine in engines:
            engine.gate.set()
        assert DONE.strip() in await last[0].read()
        await until(lambda: kvpin.process.poll() == 0)
        address = urlsplit(kvpin.url)
        with socket.socket() as probe:
            assert probe.connect_ex((address.hostname, address.port)) != 0
        assert not running() & {*old.values(), *pids(kvpin).values()}
        assert not is_left_in(temporary)


async def test_who_comes_while_the_workers_start_waits(tmp_path):
    async def serve(exchange):
        await is_loaded.wait()
        await answer(exchange)

    is_loaded = asyncio.Event()
    async with two_workers_that_start(tmp_path, serve) as kvpin:
        asked = [asyncio.create_task(ask(kvpin)) for _ in range(8)]
        _, pending = await asyncio.wait(asked, timeout=0.5)
        is_loaded.set()
        assert len(pending) == 8
        assert [each.status_code for each in await asyncio.gather(*asked)] == [200] * 8


async def test_while_one_worker_has_engines_it_takes_the_connections(tmp_path):
    async def serve(exchange):
        if is_up.is_set() and holder(kvpin, exchange.port, LOCAL) == 1:
            await answer(exchange)
        else:
            await exchange.send({"error": "loading"}, status=503)

    async def status():
        return (await ask(kvpin)).status_code

    is_up = asyncio.Event()
    async with two_workers_that_start(tmp_path, serve) as kvpin:
        await until_all_serve(kvpin)  # though they have no engine after 10 s
        assert {await status() for _ in range(4)} == {503}
        is_up.set()
        async with asyncio.timeout(30):
            while await status() != 200:
                pass
        assert {await status() for _ in range(20)} == {200}


async def test_a_worker_that_cannot_be_started_is_started_later_and_knows_what_became_of_engines(tmp_path):
    async with two_workers(tmp_path) as (kvpin, engines):
        added = {"kind": "openai_compatible", "url": engines[0].url, "id": "added"}
        added["headers"] = {"x-to": "added"}  # else it would be the engine that is there
        assert kvpin.admin("POST", "engines", json=added).status_code == 201
        assert kvpin.admin("POST", "engines/b/drain").status_code == 200
        old, limits = pids(kvpin), resource.prlimit(kvpin.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(kvpin.process.pid, resource.RLIMIT_NOFILE, (8, limits[1]))
        os.kill(old[1], signal.SIGKILL)
        ended = "worker ended; it is started again"
        await until(lambda: len(logged(kvpin, ended)) > 1)
        assert logged(kvpin, ended)[1]["error"] == "it cannot be started: Too many open files"
        assert (await ask(kvpin, "/health/ready", None)).status_code == 200
        resource.prlimit(kvpin.process.pid, resource.RLIMIT_NOFILE, limits)
        await until(lambda: pids(kvpin)[1] != old[1])
        await until_all_serve(kvpin)
        # One that another worker can use is shown as ready.
        shown = {"a": "ready", "b": "draining", "added": "ready"}
        await until(lambda: {name: each["state"] for name, each in kvpin.engines().items()} == shown)
        old = pids(kvpin)
        os.kill(old[2], signal.SIGKILL)  # the first one alone knows it now
        await until(lambda: pids(kvpin)[2] != old[2])
        await until_all_serve(kvpin)
        await until(lambda: {name: each["state"] for name, each in kvpin.engines().items()} == shown)


async def test_a_worker_that_hangs_is_replaced_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", "/none")  # as under systemd
    monkeypatch.setenv("WATCHDOG_USEC", "8000000")
    async with two_workers(tmp_path) as (kvpin, _):
        old, statuses = pids(kvpin), set()
        os.kill(old[1], signal.SIGSTOP)
        while pids(kvpin)[1] == old[1]:
            statuses.add((await ask(kvpin)).status_code)
        assert statuses == {200}
        (hung,) = logged(kvpin, "worker hangs: it is killed, and the answers that it was giving are lost")
        assert (hung["worker"], hung["pid"]) == (1, old[1])
        (ended,) = logged(kvpin, "worker ended; it is started again")
        assert (ended["worker"], ended["error"]) == (1, "ended by signal 9 (Killed)")
        await until_all_serve(kvpin)
        assert pids(kvpin)[2] == old[2]
