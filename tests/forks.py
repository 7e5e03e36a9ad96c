"""Starts kvpin, its embedded engines and its tokenizer loaders by a fork of a process that has imported them.

The imports of such a process take seconds, and tests start hundreds. Everything else is as in a process of
its own: a process id, signals, standard streams, environment, and an end that the starter hears of.

    start("proxy.cli", "serve", …)  →  a process, with the methods of subprocess.Popen
    fork server of a module         ←  a request on a Unix socket, with the descriptors that the process gets
                                    →  its process id, and later its exit status

A kvpin that was started so starts its own engines and workers so, too. Tests that are about the start itself
run the command: they use subprocess. So does `start` if the environment differs in what imports read.

`python -m tests.forks MODULE FD` is a fork server. It ends, with all that it started, when its standard input
closes.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import importlib
import os
import re
import secrets
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple
from uuid import uuid4

import msgspec

ROOT = Path(__file__).parents[1]
_MOST_BYTES, _MOST_FILES = 1 << 17, 64
_ABOVE = 512  # descriptors from here on are no process's own
# Variables that are read when modules are imported, or before: a fork would not see a change.
_READ_EARLY = re.compile(
    r"(?:HF|TRANSFORMERS|TORCH|OMP|MKL|OPENBLAS|GOTO|NUMEXPR|TOKENIZERS|PYTHON|LD|LC|XDG_CACHE|MALLOC)_?.*"
    r"|HOME|LANG|TZ|FAKETIME.*|NOTIFY_SOCKET"
)
_ENVIRONMENT = dict(os.environ)


class _Program(NamedTuple):
    """What `python -m MODULE` does: imports, and then a function of a module."""

    module: str
    function: str
    imports: tuple[str, ...]
    without: tuple[str, ...] = ()


_PROGRAMS = {
    "proxy.cli": _Program("proxy.cli", "main", ("proxy.server.run", "uvloop")),
    "engine_adapter.torch_engine": _Program(
        "engine_adapter.torch_engine.serve",
        "app",
        ("engine_adapter.torch_engine.server", "engine_adapter.torch_engine.service"),
    ),
    "engine_adapter.prompt.tokenizer_process": _Program(
        "engine_adapter.prompt.tokenizer_process",
        "main",
        ("transformers.models.auto.tokenization_auto", "transformers.tokenization_utils_tokenizers"),
        without=("torch",),
    ),
}


class _Order(msgspec.Struct):
    """What a fork server is asked for.

    Attributes:
        files: the descriptors of the new process, as those that come along.
        own_session: it leads a session and a process group of its own.
        last: the signal that it gets if its starter ends first.
    """

    arguments: list[str]
    environment: dict[str, str]
    directory: str
    files: list[int]
    last: int
    own_session: bool = False


# --- starters -------------------------------------------------------------------------------------------


class Homes:
    """The fork servers of one test process, by module: each starts at its first use."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvpin-forks-")
        self.paths = {module: str(Path(self._directory.name, module)) for module in _PROGRAMS}
        self._servers = [_server(module, path) for module, path in self.paths.items()]
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the servers and all that they started."""
        for server in self._servers:
            if server.stdin is not None:
                server.stdin.close()
        for server in self._servers:
            server.wait()
        self._directory.cleanup()


_homes: Homes | None = None
_first = threading.Lock()


def _path_of(module: str, environment: Mapping[str, str]) -> str | None:
    """The address of a fork server; None if the command is to run, as imports would read another
    environment."""
    global _homes  # noqa: PLW0603 - one for all tests of a process
    with _first:
        if _homes is None:
            _homes = Homes()
    return _homes.paths[module] if _early(environment) == _early(_ENVIRONMENT) else None


def fork_children() -> None:
    """Lets what this process starts by asyncio be forked, too: a proxy in a test loads tokenizers."""
    _fork_children(_path_of)


def start(
    module: str,
    *arguments: str,
    output: IO[bytes],
    environment: Mapping[str, str] | None = None,
    with_input: bool = False,
) -> subprocess.Popen[bytes] | Forked:
    """Starts `python -m module` with arguments; it is killed if the tests end first.

    Args:
        module: one of those that have a fork server.
        arguments: of the command line.
        output: what it writes goes there.
        environment: instead of ours.
        with_input: its standard input is a pipe, whose end is `stdin` of what this returns.
    """
    environment = dict(os.environ if environment is None else environment)
    command = [sys.executable, "-m", module, *arguments]
    if (path := _path_of(module, environment)) is None:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdin=subprocess.PIPE if with_input else None,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    reading, writing = os.pipe() if with_input else (os.open(os.devnull, os.O_RDONLY), None)
    order = _Order([*arguments], environment, str(Path.cwd()), [0, 1, 2], last=signal.SIGKILL)
    try:
        connection, pid = _forked(path, order, (reading, output.fileno(), output.fileno()))
    finally:
        os.close(reading)
    return Forked(command, connection, pid, os.fdopen(writing, "wb") if writing is not None else None)


class Forked:
    """A process that a fork server started, with what tests use of subprocess.Popen."""

    def __init__(
        self, command: list[str], connection: socket.socket, pid: int, writing: IO[bytes] | None
    ) -> None:
        self.args, self.pid, self.stdin = command, pid, writing
        self.returncode: int | None = None
        self._connection = connection
        self._reading = threading.Lock()

    def poll(self) -> int | None:
        """Its exit status, −N for signal N; None while it runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended. Raises TimeoutExpired after `timeout` seconds."""
        if (status := self._look(timeout)) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        with self._reading:
            if self.returncode is None and select.select([self._connection], [], [], timeout)[0]:
                self.returncode = _status(self._connection)
            return self.returncode


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    read = {name: value for name, value in environment.items() if _READ_EARLY.fullmatch(name)}
    read.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch itself sets it, when a test imports it
    return read


def _server(module: str, path: str) -> subprocess.Popen[bytes]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        return subprocess.Popen(
            [sys.executable, "-m", "tests.forks", module, str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if _PROGRAMS[module].without else None,  # a warning that it is missing
            pass_fds=[listener.fileno()],
            env=_ENVIRONMENT,
            cwd=ROOT,
        )


def _forked(path: str, order: _Order, files: Sequence[int]) -> tuple[socket.socket, int]:
    """Asks a fork server for a process; gives the connection that tells of its end, and its id."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    socket.send_fds(connection, [msgspec.msgpack.encode(order)], [*files])
    return connection, int(connection.recv(64))


def _status(connection: socket.socket) -> int:
    with connection:
        told = connection.recv(64)
    return int(told) if told else -signal.SIGKILL  # the server ended, and all with it


# --- a fork server, and what it starts --------------------------------------------------------------------


class _Server:
    """Forks a process for each connection."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._running = dict[socket.socket, tuple[int, int]]()  # connection → process, its last signal

    def until_forked(self) -> _Order | None:
        """Serves. Returns the order in each new process, and None in the server in the end."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the tests end, and so does this
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes[1], warn_on_full_buffer=False)
        for each in (self._listener, self._wakes[0], 0):
            self._selector.register(each, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == 0:
                    for pid, _last in self._running.values():
                        os.kill(pid, signal.SIGKILL)
                    return None
                if key.fileobj == self._wakes[0]:
                    os.read(self._wakes[0], 4096)
                    self._reap()
                elif key.fileobj is self._listener:
                    self._selector.register(self._listener.accept()[0], selectors.EVENT_READ)
                elif (order := self._heard(key.fileobj)) is not None:  # type: ignore[arg-type]
                    return order

    def _heard(self, connection: socket.socket) -> _Order | None:
        """Reads a request, or that the starter has ended. Returns the order in the new process."""
        if connection.fileno() < 0:  # its process has just ended
            return None
        data, files = b"", []
        with suppress(ConnectionError):
            data, files, *_ = socket.recv_fds(connection, _MOST_BYTES, _MOST_FILES)
        if not data:
            self._selector.unregister(connection)
            connection.close()
            if found := self._running.pop(connection, None):
                os.kill(*found)
            return None
        order = msgspec.msgpack.decode(data, type=_Order)
        if (pid := os.fork()) == 0:
            self._leave()
            _become(order, files)
            return order
        for file in files:
            os.close(file)
        self._running[connection] = (pid, order.last)
        with suppress(ConnectionError):  # who asked may have ended meanwhile
            connection.send(str(pid).encode())
        return None

    def _reap(self) -> None:
        """Tells starters of processes that have ended."""
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                for connection, (pid, _) in list(self._running.items()):
                    if pid == found[0]:
                        del self._running[connection]
                        self._selector.unregister(connection)
                        with suppress(OSError), connection:
                            connection.send(str(os.waitstatus_to_exitcode(found[1])).encode())

    def _leave(self) -> None:
        """Closes in the new process what is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        for each in self._wakes:
            os.close(each)


def _become(order: _Order, files: list[int]) -> None:
    """Makes this process what was ordered."""
    held = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for file in files]
    for file in files:
        os.close(file)
    for file, wanted in zip(held, order.files, strict=True):
        os.dup2(file, wanted)
        os.close(file)
    if order.own_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.directory)
    sys.argv[1:] = order.arguments
    _renew()


def _renew() -> None:
    """Draws anew what kvpin draws when it is imported: processes have none of it in common."""
    if (files := sys.modules.get("engine_adapter.llama_server.server_files")) is None:
        return
    known, unknown = files.UNKNOWN_OWNER, uuid4().hex
    for module in list(sys.modules.values()):
        if getattr(module, "UNKNOWN_OWNER", None) is known:
            module.UNKNOWN_OWNER = unknown  # type: ignore[attr-defined]
    if (requests := sys.modules.get("engine_adapter.llama_server.requests")) is not None:
        requests._UNKNOWN = requests.SlotRequest(requests._UNKNOWN.tokens, unknown)
    if (events := sys.modules.get("engine_adapter.llama_server.mirror_events")) is not None:
        events._KEY = secrets.token_bytes(len(events._KEY))


def main() -> None:
    """Runs a fork server, and in each new process its program."""
    program = _PROGRAMS[sys.argv[1]]
    listener = socket.socket(fileno=int(sys.argv[2]))
    for name in program.without:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in program.imports:
        importlib.import_module(name)
    run = getattr(importlib.import_module(program.module), program.function)
    paths = {module: str(Path(listener.getsockname()).with_name(module)) for module in _PROGRAMS}
    order = _Server(listener).until_forked()
    if order is not None:
        _fork_children(lambda module, _environment: paths[module])
        run()


# --- what a forked process starts ---------------------------------------------------------------------------


class _Asking:
    """A request to a fork server from an event loop. If it is cancelled, what was forked ends."""

    def __init__(self, path: str, order: _Order, files: Sequence[int]) -> None:
        self._path, self._order = path, order
        self._files = [os.dup(file) for file in files]  # it may take longer than who asks waits
        self._connection: socket.socket | None = None
        self._cancelled = False
        self._turn = threading.Lock()

    async def answer(self) -> tuple[socket.socket, int]:
        try:
            return await asyncio.to_thread(self._ask)
        except asyncio.CancelledError:
            with self._turn:
                self._cancelled = True
                if self._connection is not None:
                    self._connection.close()
            raise

    def _ask(self) -> tuple[socket.socket, int]:
        try:
            connection, pid = _forked(self._path, self._order, self._files)
        finally:
            for file in self._files:
                os.close(file)
        with self._turn:
            self._connection = connection
            if self._cancelled:
                connection.close()
        return connection, pid


class _Child:
    """A process that a forked kvpin started, with what kvpin uses of asyncio's."""

    def __init__(self, connection: socket.socket, pid: int, stdout: int | None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection, self._stdout = connection, stdout
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection.fileno(), self._note)

    def _note(self) -> None:
        self._loop.remove_reader(self._connection.fileno())
        self.returncode = _status(self._connection)
        self._ended.set()

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode

    async def communicate(self) -> tuple[bytes, None]:
        if self._stdout is None:
            raise ValueError("its output goes elsewhere")
        reader, pipe = asyncio.StreamReader(), os.fdopen(self._stdout, "rb")
        transport, _ = await self._loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            told = await reader.read()
        finally:
            transport.close()
        await self.wait()
        return told, None

    def send_signal(self, number: int) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _fork_children(path_of: Callable[[str, Mapping[str, str]], str | None]) -> None:
    """Lets `asyncio.create_subprocess_exec` fork what has a fork server.

    `path_of`: module, environment → the address of the server; None if the command is to run.
    """
    execute: Callable[..., Any] = asyncio.create_subprocess_exec

    async def create(*command: str, **options: Any) -> Any:
        at = command.index("-m") if "-m" in command else 0
        environment = {**(options.get("env") or os.environ)}
        is_ours = at and command[at - 1] == sys.executable and command[at + 1] in _PROGRAMS
        path = await asyncio.to_thread(path_of, command[at + 1], environment) if is_ours else None
        if path is None:
            return await execute(*command, **options)
        ours, theirs = None, []
        try:
            for number, name in enumerate(("stdin", "stdout", "stderr")):
                given = options.get(name)
                if given == subprocess.PIPE:
                    ours, given = os.pipe()
                elif given == subprocess.DEVNULL:
                    given = os.open(os.devnull, os.O_RDWR)
                else:
                    given = os.dup(given if isinstance(given, int) else given.fileno() if given else number)
                theirs.append(given)
            passed = [*options.get("pass_fds", ())]
            order = _Order(
                [*command[at + 2 :]],
                environment,
                str(Path.cwd()),
                [0, 1, 2, *passed],
                own_session=options.get("start_new_session", False),
                last=signal.SIGTERM,
            )
            connection, pid = await _Asking(path, order, [*theirs, *passed]).answer()
        except BaseException:
            if ours is not None:
                os.close(ours)
            raise
        finally:
            for file in theirs:
                os.close(file)
        return _Child(connection, pid, ours)

    asyncio.create_subprocess_exec = create


if __name__ == "__main__":
    main()
