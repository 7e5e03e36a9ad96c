"""Real child processes, with short times."""

import asyncio
import contextlib
import errno
import gc
import os
import signal
import sys
from collections import deque
from io import FileIO
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from proxy.fleet.managed_engine import (
    MAX_LINE_BYTES,
    ManagedEngine,
    ProcessState,
    log_output,
)
from proxy.settings import ManagedSettings
from tests.kv_world import until
from tests.processes import is_alive

SERVER = """
import http.server, os, pathlib, signal, subprocess, sys, time
home, mode = pathlib.Path(sys.argv[2]), sys.argv[3]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        well = self.path == "/health" and not (home / "sick").exists()
        while (home / "busy").exists():
            pass
        while (home / "hung").exists():
            time.sleep(0.01)
        self.send_response(200 if well else 503)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *args):
        pass
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "parent":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (home / "child").write_text(str(child.pid))
print("says hello", os.environ.get("KVPIN_ADMIN_KEY"), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

QUICK = {"backoff_s": 0.02, "max_backoff_s": 0.08, "poll_s": 0.02, "unhealthy_s": 0.1, "grace_s": 5}


def engine_of(*command, timing=QUICK, **settings):
    engine = ManagedEngine(ManagedSettings(**({"kind": "vllm", "id": "e-0", "command": command} | settings)))
    vars(engine).update(timing)
    return engine


def server(tmp_path, mode="plain", timing=QUICK):
    return engine_of(sys.executable, "-c", SERVER, "{port}", str(tmp_path), mode, timing=timing)


@contextlib.asynccontextmanager
async def running(engine):
    task = asyncio.create_task(engine.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def is_ready(engine):
    return lambda: engine.state is ProcessState.READY


async def test_a_killed_engine_comes_back_on_its_port_and_its_children_end_with_it(tmp_path):
    engine = server(tmp_path, "parent")
    assert (engine.state, engine.starting) == (ProcessState.STOPPED, True)
    async with running(engine) as task:
        await until(is_ready(engine))
        first, port, child = engine.pid, engine.port, int((tmp_path / "child").read_text())
        assert is_alive(child)
        os.kill(first, signal.SIGKILL)
        await until(lambda: not is_alive(child))
        await until(lambda: engine.restarts == 1)
        assert not engine.starting
        await until(is_ready(engine))
        assert (engine.pid != first, engine.port) == (True, port)
        assert engine.last_exit_code == -signal.SIGKILL
        child = int((tmp_path / "child").read_text())
        await engine.stop()
        await until(lambda: not is_alive(child))
        await asyncio.wait_for(task, 10)
        assert (engine.restarts, engine.state, engine.pid) == (1, ProcessState.STOPPED, None)
        assert engine.last_exit_code == -signal.SIGTERM
        await engine.stop()  # again is fine


async def test_one_that_ignores_sigterm_is_killed(tmp_path):
    engine = server(tmp_path, "stubborn", {"poll_s": 0.02, "grace_s": 0.1})
    async with running(engine):
        await until(is_ready(engine))
    assert engine.last_exit_code == -signal.SIGKILL


async def test_stop_while_backing_off_ends_run():
    engine = engine_of(sys.executable, "-c", "", "{port}", timing={"backoff_s": 0.2})
    async with running(engine) as task:
        await until(lambda: engine.state is ProcessState.BACKING_OFF)
        await engine.stop()
        await asyncio.wait_for(task, 10)
        assert engine.restarts == 0


BROKEN = "import sys; print('loading'); sys.exit('no GPU found')"


async def test_a_command_that_ends_at_once_is_tried_ever_less_often_then_given_up_and_says_why():
    engine = engine_of(sys.executable, "-c", BROKEN, "{port}", timing=QUICK | {"attempts": 5})
    with capture_logs() as entries:
        await asyncio.wait_for(engine.run(), 30)
    error = "exit code 1\nloading\nno GPU found"
    ends = [entry for entry in entries if "exit_code" in entry]
    assert [entry.get("restart_in_s") for entry in ends] == [0.02, 0.04, 0.08, 0.08, None]
    assert [entry["log_level"] for entry in ends] == ["warning"] * 4 + ["error"]
    assert {entry["error"] for entry in ends} == {error}
    assert ends[-1]["event"].startswith("managed engine given up")
    assert (engine.state, engine.error) == (ProcessState.FAILED, error)
    assert (engine.starting, engine.last_exit_code) == (False, 1)
    await engine.stop()
    assert engine.state is ProcessState.FAILED


async def test_a_usage_error_is_final():
    engine = engine_of(sys.executable, "-c", "import sys; print('no such option'); sys.exit(2)", "{port}")
    with capture_logs() as entries:
        await asyncio.wait_for(engine.run(), 30)
    assert [entry["starts"] for entry in entries if "exit_code" in entry] == [1]
    assert engine.state is ProcessState.FAILED
    assert engine.error == "exit code 2\nno such option"


async def test_one_that_was_healthy_once_is_never_given_up_and_its_wait_starts_over(tmp_path):
    timing = {"attempts": 1, "backoff_s": 0.02, "max_backoff_s": 9, "healthy_s": 0.0, "poll_s": 0.02}
    engine = server(tmp_path, timing=timing)
    with capture_logs() as entries:
        async with running(engine):
            await until(is_ready(engine))
            for restarts in (1, 2):
                os.kill(engine.pid, signal.SIGKILL)
                await until(lambda: engine.error is not None)
                assert engine.error.startswith("ended by signal 9 (Killed)\nsays hello")
                await until(lambda n=restarts: engine.restarts == n and is_ready(engine)())
                assert engine.error is None
    assert [entry["restart_in_s"] for entry in entries if "restart_in_s" in entry] == [0.02, 0.02]


async def test_a_program_that_does_not_exist_is_told_and_tried_again():
    engine = engine_of("/nowhere/engine", "{port}")
    with capture_logs() as entries:
        async with running(engine):
            await until(lambda: engine.restarts == 1)
    assert any("no program '/nowhere/engine'" in entry.get("error", "") for entry in entries)
    assert ("no program '/nowhere/engine'" in engine.error, engine.last_exit_code) == (True, None)


@pytest.mark.parametrize("left", [0, 1])
async def test_one_that_cannot_be_started_for_lack_of_file_descriptors_is_tried_again(
    tmp_path, monkeypatch, left
):
    made, pipe = [], os.pipe

    def pipe_if_there_is_one():
        made.append(1)
        if len(made) == left + 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return pipe()

    monkeypatch.setattr(os, "pipe", pipe_if_there_is_one)
    engine = server(tmp_path)
    with capture_logs() as entries:
        async with running(engine):
            await until(is_ready(engine))
    (failed,) = [entry for entry in entries if "restart_in_s" in entry]
    assert (failed["error"], failed["exit_code"]) == ("[Errno 24] Too many open files", None)
    assert engine.restarts == 1


async def test_what_it_says_is_logged_and_our_settings_are_not_its(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPIN_ADMIN_KEY", "hush")
    engine = server(tmp_path)
    with capture_logs() as entries:
        async with running(engine):
            await until(is_ready(engine))
    said = [(entry["event"], entry["engine"], entry["log_level"]) for entry in entries if "line" in entry]
    assert said[0] == ("engine output", "e-0", "info")
    assert "says hello None" in [entry.get("line") for entry in entries]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
async def test_nothing_is_left_open(tmp_path):
    first = server(tmp_path)
    async with running(first):
        await until(lambda: first.pid is not None)  # whatever asyncio itself opens once
    gc.collect()  # what earlier tests left
    before = open_files()
    engine = engine_of(sys.executable, "-c", "", "{port}")
    async with running(engine):
        await until(lambda: engine.restarts == 3)
    assert open_files() == before


KEYED = [("embedded", "KVPIN_ENGINE_KEY", ()), ("llama_server", "LLAMA_API_KEY", ("-m", "m.gguf"))]


@pytest.mark.parametrize(("kind", "variable", "command"), KEYED)
def test_an_engine_that_takes_a_key_gets_one_that_nobody_else_sees_or_that_of_the_settings(
    kind, variable, command
):
    one, other = (engine_of(*command, kind=kind) for _ in range(2))
    key = one.spec.api_key
    assert len(key) >= 43  # 256 bits
    assert key != other.spec.api_key
    assert one._environment()[variable] == key
    assert key not in f"{one.command()} {one.spec} {one.describe()}"
    engine = engine_of(*command, kind=kind, api_key="mine")
    assert (engine.spec.api_key, engine._environment()[variable]) == ("mine", "mine")


def test_a_key_of_the_command_stays():
    engine = engine_of("-m", "m.gguf", "--api-key", "a,b", kind="llama_server")
    assert (engine.spec.api_key, engine._environment()["LLAMA_API_KEY"]) == ("a", "a")


async def test_an_embedded_engine_asks_for_its_key():
    engine = engine_of("--kv-blocks", "64", kind="embedded", timing={})
    async with running(engine), httpx.AsyncClient(base_url=engine.spec.url, trust_env=False) as client:
        await until(is_ready(engine), 60)
        assert (await client.get("/kv/info")).status_code == 401
        assert (await client.post("/kv/flush")).status_code == 401
        key = {"authorization": f"Bearer {engine.spec.api_key}"}
        assert (await client.get("/kv/info", headers=key)).status_code == 200


async def test_what_works_against_reuse_is_told_once(tmp_path):
    words = (sys.executable, "-m", str(tmp_path / "m.gguf"), "--no-cache-prompt", "--context-shift")
    engine = engine_of(*words, kind="llama_server", host_cache_dir=str(tmp_path))
    with capture_logs() as entries:
        async with running(engine):
            await until(lambda: engine.restarts == 1)
    advice = [entry["advice"] for entry in entries if "advice" in entry]
    assert [sentence.split()[0] for sentence in advice] == ["--no-cache-prompt", "--context-shift"]


async def test_an_engines_stdin_stays_open(tmp_path):
    code = f"import sys; open({str(tmp_path / 'open')!r}, 'w').close(); sys.stdin.read(); sys.exit(7)"
    engine = engine_of(sys.executable, "-c", code, "{port}")
    async with running(engine):
        await until((tmp_path / "open").exists)
        assert (engine.state, engine.last_exit_code) == (ProcessState.STARTING, None)


async def test_stop_while_it_is_being_started(tmp_path, monkeypatch):
    engine = server(tmp_path)
    start = asyncio.create_subprocess_exec

    async def start_slowly(*args, **options):
        process = await start(*args, **options)
        await engine.stop()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_slowly)
    await asyncio.wait_for(engine.run(), 10)
    assert engine.last_exit_code == -signal.SIGKILL
    assert engine.state is ProcessState.STOPPED


async def test_one_that_computes_is_not_restarted(tmp_path):
    engine = server(tmp_path)
    async with running(engine):
        await until(is_ready(engine))
        pid = engine.pid
        (tmp_path / "busy").touch()
        await until(lambda: engine.computing)  # after the first check without an answer, of 1 s
        await asyncio.sleep(QUICK["unhealthy_s"])
        assert (engine.computing, engine.pid) == (True, pid)
        (tmp_path / "busy").unlink()
        await until(lambda: not engine.computing)
        assert (engine.pid, engine.restarts) == (pid, 0)


@pytest.mark.parametrize(
    ("how", "timing"), [("sick", QUICK), ("hung", QUICK), ("busy", QUICK | {"stuck_s": 1.5})]
)
async def test_one_that_is_unhealthy_or_stuck_is_restarted(tmp_path, how, timing):
    engine = server(tmp_path, timing=timing)
    async with running(engine):
        await until(is_ready(engine))
        pid = engine.pid
        (tmp_path / how).touch()
        await until(lambda: not is_alive(pid))
        (tmp_path / how).unlink()
        await until(lambda: is_ready(engine)() and engine.pid != pid)


async def entries_of(*writes, keep=3, **options):
    reading, writing = os.pipe()
    with open(writing, "wb", buffering=0) as pipe:  # noqa: ASYNC230, PTH123 - a pipe with room enough
        pipe.writelines(writes)
    last_lines = deque(maxlen=keep)
    with capture_logs() as entries:
        output = FileIO(reading, "rb")
        await log_output(output, last_lines, engine="e-0", **{"is_ready": lambda: False, **options})
    assert output.closed
    assert all(entry["engine"] == "e-0" for entry in entries)
    lines = [entry["line"] for entry in entries]
    assert list(last_lines) == [line for line in lines if line not in INFORMATION][-keep:]
    return entries


@pytest.mark.parametrize(
    ("writes", "lines"),
    [
        ([b"one\ntwo\nthree\nfour\n"], ["one", "two", "three", "four"]),  # the last three are kept
        ([b"on", b"e\r\ntw", b"o"], ["one", "two"]),
        ([b"\x1b[31m 10%\x1b[0m\r 20%\r\n\n"], [" 10%", " 20%"]),
        ([b"caf\xe9\n"], ["caf\ufffd"]),
        ([b"x" * (2 * MAX_LINE_BYTES + 3)], ["x" * MAX_LINE_BYTES, "x" * MAX_LINE_BYTES, "xxx"]),
    ],
    ids=["several lines", "in pieces", "progress bars and colours", "no UTF-8", "an endless line"],
)
async def test_each_line_is_logged_with_the_engine(writes, lines):
    assert [entry["line"] for entry in await entries_of(*writes)] == lines


INFORMATION = (
    "0.06.006.292 I slot launch_slot_: id  1 | task 0 | processing task",
    "INFO 11-23 05:12:10 [loggers.py:248] Engine 000: running: 1 reqs",
    "(APIServer pid=7) INFO:     127.0.0.1:80 - GET /health 200 OK",
    "2026-11-23 05:12:10,123 INFO kvpin.engine: loading the model",
)
OTHERS = (
    "0.06.006.292 W slot update_slots: the context is full",
    "0.06.006.292 E srv  send_error: no",
    "WARNING 11-23 05:12:10 [scheduler.py:1] the queue is long",
    "2026-11-23 05:12:10,123 WARNING kvpin.engine: the cache is full",
    "Traceback (most recent call last):",
)


@pytest.mark.parametrize("is_ready", [True, False])
async def test_what_an_engine_says_of_each_request_is_for_those_who_look_for_it(is_ready):
    said = [f"{line}\n".encode() for line in (*INFORMATION, *OTHERS)]
    entries = await entries_of(*said, keep=9, is_ready=lambda: is_ready)
    levels = {entry["line"]: entry["log_level"] for entry in entries}
    of_information = "debug" if is_ready else "info"
    assert levels == dict.fromkeys(INFORMATION, of_information) | dict.fromkeys(OTHERS, "info")
