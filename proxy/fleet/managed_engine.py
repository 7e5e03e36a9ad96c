"""An engine that kvpin starts, watches and restarts: one process, with all its children."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import socket
import time
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import replace
from enum import StrEnum
from io import FileIO
from pathlib import Path

import structlog

from engine_adapter import (
    EngineSpecError,
    EngineUnavailable,
    HttpTransport,
    OutgoingRequest,
    ends_with_parent,
    managed_kind,
)
from proxy.runtime import within
from proxy.settings import ManagedSettings

log = structlog.get_logger(__name__)

_DRAIN_S = 1.0
_SHOWN_LINES = 5
_SHOWN_AFTER_SIGNAL = 2
# The exit status of programs whose command line is wrong: another start would end alike.
_USAGE = 2


class ProcessState(StrEnum):
    """The states of a managed engine."""

    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing_off"
    FAILED = "failed"  # given up
    STOPPED = "stopped"


class ManagedEngine:
    """Keeps one engine process running while `run` runs. Raises EngineSpecError if the settings contradict
    each other.

    Attributes:
        port: chosen once; a restarted engine has the same port.
        spec: the description its adapter is made from. An engine that takes a key gets a random one, unless
            the settings name one.
        last_exit_code: exit code of the last process that ended, −N for signal N; None before the first end.
        error: why it does not run: the exit code and the last lines it wrote; None while nothing is wrong.
        computing: it gives no answer because it computes. It is given `stuck_s` for that.
    """

    # When it is checked, restarted and given up, in seconds.
    backoff_s, max_backoff_s = 0.5, 30.0
    healthy_s = 60.0  # in `ready`: after that, the wait is `backoff_s` again
    poll_s = 0.5
    unhealthy_s = 30.0  # a ready engine without a successful check for that long is restarted,
    stuck_s = 600.0  # or for that long where it gives no answer while it computes
    grace_s = 26.0  # the embedded engine takes up to 23: 20 for its requests, 3 to tell their clients
    attempts = 5  # starts after which an engine that was never healthy is given up

    def __init__(self, settings: ManagedSettings) -> None:
        self.id = settings.id
        self.port = _free_port()
        self.spec = spec = settings.spec(self.port)
        if managed_kind(spec.kind).key_variable is not None and spec.api_key is None:
            self.spec = replace(spec, api_key=secrets.token_urlsafe())
        self._words = settings.command
        self._health_url = f"http://127.0.0.1:{self.port}{managed_kind(settings.kind).health_path}"
        self._process: Process | None = None
        self.state = ProcessState.STOPPED
        self._starts = 0
        self.last_exit_code: int | None = None
        self._last_lines: deque[str] = deque(maxlen=_SHOWN_LINES)
        self.error: str | None = None
        self._was_ready = False
        self._ready_since: float | None = None
        self.computing = False
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Its process; None while none runs."""
        return self._process.pid if self._process is not None else None

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return max(self._starts - 1, 0)

    @property
    def starting(self) -> bool:
        """True if it is in its first start: not healthy yet, nothing wrong yet."""
        is_new = self.state in (ProcessState.STOPPED, ProcessState.STARTING)
        return self._starts <= 1 and is_new and not self._stopping.is_set()

    def describe(self) -> dict[str, str | int | None]:
        """What is told of its process."""
        told = ("state", "port", "pid", "restarts", "last_exit_code", "error")
        return {name: getattr(self, name) for name in told}

    def command(self) -> list[str]:
        """Its command line."""
        return managed_kind(self.spec.kind).command(self._words, self.port, self.spec)

    async def run(self) -> None:
        """Starts the engine, and restarts it whenever it ends, until `stop` or until it is given up.

        Cancelling this stops the engine.
        """
        for sentence in managed_kind(self.spec.kind).advice(self._words):
            log.warning("the engine's command works against KV reuse", engine=self.id, advice=sentence)
        backoff_s = self.backoff_s
        try:
            while True:
                await self._run_once()
                if self._stopping.is_set() or self._give_up():
                    return
                ready_s = time.monotonic() - self._ready_since if self._ready_since is not None else 0.0
                if ready_s >= self.healthy_s:
                    backoff_s = self.backoff_s
                self.state = ProcessState.BACKING_OFF
                log.warning(
                    "managed engine ended; kvpin starts it again",
                    engine=self.id,
                    error=self.error,
                    exit_code=self.last_exit_code,
                    restart_in_s=backoff_s,
                )
                await within(backoff_s, self._stopping.wait())
                if self._stopping.is_set():
                    return
                backoff_s = min(2 * backoff_s, self.max_backoff_s)
        finally:
            await self.stop()

    def _give_up(self) -> bool:
        """True if to stop restarting: no start has ever made it healthy."""
        is_last = self._starts >= self.attempts or self.last_exit_code == _USAGE
        if self._was_ready or not is_last:
            return False
        self.state = ProcessState.FAILED
        log.error(
            "managed engine given up: it ended at each start; correct its command and restart kvpin",
            engine=self.id,
            error=self.error,
            exit_code=self.last_exit_code,
            starts=self._starts,
        )
        return True

    async def stop(self) -> None:
        """Stops the process and its children for good: SIGTERM, then SIGKILL. May be called again."""
        self._stopping.set()
        if self.state is not ProcessState.FAILED:
            self.state = ProcessState.STOPPED
        if (process := self._process) is None:
            return
        try:
            await self._end(process)
        finally:
            _signal_group(process.pid, signal.SIGKILL)
        self._note_end(process)

    async def _run_once(self) -> None:
        self.state = ProcessState.STARTING
        self._ready_since = None
        self._last_lines.clear()
        self._starts += 1
        with ExitStack() as pipes:
            try:
                output, its_output = pipes.enter_context(_pipe())
                its_input, _ = pipes.enter_context(_pipe())
                managed_kind(self.spec.kind).prepare(self.spec, self._words)
                process = await asyncio.create_subprocess_exec(
                    *ends_with_parent(self.command()),
                    # Closes when kvpin ends: engines may watch it where the kernel sends no signal.
                    stdin=its_input,
                    stdout=its_output,
                    stderr=its_output,
                    env=self._environment(),
                    start_new_session=True,
                )
            except (OSError, EngineSpecError) as error:
                self.last_exit_code = None
                self.error = str(error)
                return
            self._process = process
            if self._stopping.is_set():  # `stop` was called during the start
                _signal_group(process.pid, signal.SIGKILL)
            its_output.close()
            its_input.close()
            log.info("managed engine started", engine=self.id, port=self.port, pid=process.pid)
            await self._attend(process, output)

    async def _attend(self, process: Process, output: FileIO) -> None:
        """Logs the process's output and checks its health until it ends."""
        async with asyncio.TaskGroup() as tasks:
            logging = log_output(
                output, self._last_lines, engine=self.id, is_ready=lambda: self.state is ProcessState.READY
            )
            reader = tasks.create_task(logging)
            health = tasks.create_task(self._watch_health(process))
            await process.wait()
            health.cancel()
            # Children that outlive it would keep its port and its memory.
            _signal_group(process.pid, signal.SIGKILL)
            self._note_end(process)
            await asyncio.wait([reader], timeout=_DRAIN_S)
            reader.cancel()
        if not self._stopping.is_set():
            # A signal comes from outside: what the engine said before it is seldom the cause.
            shown = _SHOWN_AFTER_SIGNAL if (process.returncode or 0) < 0 else _SHOWN_LINES
            self.error = "\n".join((end_of(process.returncode), *list(self._last_lines)[-shown:]))

    async def _watch_health(self, process: Process) -> None:
        """Marks the engine ready; ends the process if the engine later stays unhealthy, or is stuck.

        One that gives no answer while it takes CPU time computes: a restart would lose all its KV.
        """
        last_good = last_sign = time.monotonic()
        cpu = CpuTime(process.pid)
        async with aclosing(HttpTransport()) as client:
            while True:
                is_healthy = await self._is_healthy(client)
                self.computing = cpu.is_used() and is_healthy is None
                now = time.monotonic()
                if is_healthy:
                    last_good = now
                    if self.state is ProcessState.STARTING:
                        self.state, self._ready_since = ProcessState.READY, last_good
                        self._was_ready, self.error = True, None
                        log.info("managed engine is healthy", engine=self.id, port=self.port)
                if is_healthy or self.computing:
                    last_sign = now
                if self.state is ProcessState.READY and (
                    now - last_sign > self.unhealthy_s or now - last_good > self.stuck_s
                ):
                    log.warning(
                        "managed engine is not healthy; kvpin restarts it",
                        engine=self.id,
                        unhealthy_s=round(now - last_good, 1),
                    )
                    await self._end(process)
                    return
                await asyncio.sleep(self.poll_s)

    async def _is_healthy(self, client: HttpTransport) -> bool | None:
        """True if the engine says that it is healthy; None if it does not answer in time."""
        request = OutgoingRequest("GET", self._health_url)
        try:
            async with asyncio.timeout(max(self.poll_s, 1.0)), await client.send(request) as answer:
                await answer.read()
        except TimeoutError:
            return None
        except EngineUnavailable:
            return False
        return 200 <= answer.status < 300  # noqa: PLR2004 - HTTP

    async def _end(self, process: Process) -> None:
        """Sends SIGTERM, and after the grace time SIGKILL, to the process and all its children."""
        if process.returncode is not None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(self.grace_s):
                await process.wait()
        except TimeoutError:
            event = "managed engine ignores SIGTERM; kvpin kills it"
            log.warning(event, engine=self.id, grace_s=self.grace_s)
            _signal_group(process.pid, signal.SIGKILL)
            await process.wait()

    def _environment(self) -> dict[str, str]:
        """Our environment without kvpin's settings, of which some are secret, and with the engine's key."""
        own = {name: value for name, value in os.environ.items() if not name.upper().startswith("KVPIN_")}
        variable, key = managed_kind(self.spec.kind).key_variable, self.spec.api_key
        return own if variable is None or key is None else {**own, variable: key}

    def _note_end(self, process: Process) -> None:
        if self._process is process:
            self._process = None
            self.last_exit_code = process.returncode


@contextmanager
def _pipe() -> Iterator[tuple[FileIO, FileIO]]:
    """The ends of a pipe, to read and to write. Either may be closed before the block ends."""
    reading, writing = os.pipe()
    ends = FileIO(reading, "rb"), FileIO(writing, "wb")
    try:
        yield ends
    finally:
        for end in ends:
            with suppress(OSError):  # the event loop closed it, if it was cancelled while it began to read
                end.close()


def end_of(exit_code: int | None) -> str:
    """The end of a process in words: its signal or its exit code."""
    if exit_code is not None and exit_code < 0:
        return f"ended by signal {-exit_code} ({signal.strsignal(-exit_code)})"
    return f"exit code {exit_code}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _signal_group(pid: int, number: signal.Signals) -> None:
    """Sends a signal to a process and its children, if they still exist."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


# Of a CPU. A server that waits takes less.
_SHARE = 0.02


class CpuTime:
    """The CPU time of a process, from look to look."""

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._last = self._now()

    def is_used(self) -> bool:
        """True if the process has taken CPU time since the last call; False where nobody knows."""
        (before_s, used_before_s), self._last = self._last, self._now()
        now_s, used_s = self._last
        return used_s - used_before_s > _SHARE * (now_s - before_s)

    def _now(self) -> tuple[float, float]:
        """The time, and the seconds that all threads of the process have taken; 0.0 for one that is gone."""
        try:
            fields = self._stat.read_text().rpartition(")")[2].split()
        except OSError:
            return time.monotonic(), 0.0
        return time.monotonic(), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


MAX_LINE_BYTES = 8192
_CHUNK_BYTES = 65_536
_LINE_END = re.compile(rb"[\r\n]+")  # progress bars end lines with \r
# Lines that call themselves information: llama-server's, and those of Python's engines, with the time before.
_INFORMATION = re.compile(r"[\d.]+ [ID] |(?:\(.*?\) |\d{4}-\d\d-\d\d [\d:,]+ )?(?:INFO|DEBUG)\b")
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


async def log_output(
    output: FileIO, last_lines: deque[str], *, engine: str, is_ready: Callable[[], bool]
) -> None:
    """Logs each line that comes out of a pipe, with the engine's id, until the pipe ends.

    Lines beyond 8 KiB are split. The level is info. While the engine is ready, lines that call themselves
    information have the level debug: there are several for each request.

    `last_lines` gets each line that may say why a process ends, so none of information; its `maxlen` bounds
    it. The pipe is closed in the end.
    """

    def log_line(line: bytes) -> None:
        text = _COLOUR.sub("", line.decode(errors="replace")).rstrip()
        if text:
            is_information = _INFORMATION.match(text)
            if not is_information:
                last_lines.append(text)
            level = log.debug if is_ready() and is_information else log.info
            level("engine output", engine=engine, line=text)

    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), output
    )
    pending = b""
    try:
        while chunk := await reader.read(_CHUNK_BYTES):
            *lines, pending = _LINE_END.split(pending + chunk)
            for line in lines:
                log_line(line)
            while len(pending) > MAX_LINE_BYTES:
                log_line(pending[:MAX_LINE_BYTES])
                pending = pending[MAX_LINE_BYTES:]
    finally:
        transport.close()
        log_line(pending)
