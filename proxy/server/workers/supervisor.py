"""Starts the workers, watches them, and passes on what signals say.

    SIGTERM, SIGINT  go to all workers, each of which stops as one kvpin does; then the engines stop
    SIGHUP           the engines follow the settings, and the workers read them again
    a worker ends    it is started again, after a wait that doubles up to `MAX_BACKOFF_S`
    a worker hangs   it is killed, and so ends

The supervisor serves no request. If it is killed, its workers stop in order.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import structlog
from pydantic import SecretStr

from engine_adapter import EngineSpec, EngineSpecError, HttpTransport, ends_with_parent
from proxy.api.siblings import USES_PATH, ask, socket_of
from proxy.fleet.managed_engine import ManagedEngine, ProcessState, end_of
from proxy.peers.bus import MAX_PATH_BYTES
from proxy.runtime import Supervisor, until, within
from proxy.server.checks import check, check_reload, issued_keys, managed_engines
from proxy.server.workers.fairness import TALLY, ConnectionTally
from proxy.settings import (
    WORKER_VARIABLE,
    EngineEntry,
    EngineSettings,
    ExchangeSettings,
    ManagedSettings,
    Settings,
    SettingsError,
    StartedSettings,
    engine_changes,
    read_engines,
)

# --- notices a process whose event loop stands still ----------------------------------------------------
# A supervisor or a single kvpin tells systemd that it lives if the unit has WatchdogSec=, by the protocol of
# sd_watchdog_enabled(3). Workers tell their supervisor in the memory that they share.

# A worker that is silent for that long hangs, unless systemd says another time.
SILENT_S = 30.0
_SOCKET, _TIME, _PROCESS = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
_US_PER_S = 1_000_000
_ALIVE = b"WATCHDOG=1"
_LOOKS = 10
_BEATS = 4


class Watchdog:
    """Tells who started this process that its event loop turns. `silent_s`: after that long without a word,
    this process counts as hung."""

    def __init__(self, address: str, silent_s: float) -> None:
        self.silent_s = silent_s
        self._address = f"\0{address[1:]}" if address.startswith("@") else address

    @classmethod
    def take(cls) -> Watchdog | None:
        """The one that the environment asks for. What this process starts does not inherit it."""
        address, time, process = (os.environ.pop(name, "") for name in (_SOCKET, _TIME, _PROCESS))
        is_other = process not in ("", str(os.getpid()))
        if not address.startswith(("/", "@")) or not time.isdecimal() or not int(time) or is_other:
            return None
        return cls(address, int(time) / _US_PER_S)

    async def run(self) -> None:
        """Says so until cancelled. Whether anybody hears it does not matter here."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            while True:
                with suppress(OSError):
                    sender.sendto(_ALIVE, self._address)
                await asyncio.sleep(self.silent_s / _BEATS)


async def until_silent(beats: Callable[[], int], silent_s: float) -> None:
    """Returns when a worker gives no sign of life any more; `beats` tells how many it has given.

    The start of a worker may take long: until it gave one, it is not missed. Looks are counted, not time:
    after the whole machine stood still, a worker has time to give one."""
    missed, before = None, beats()
    while missed is None or missed < _LOOKS:
        await asyncio.sleep(silent_s / _LOOKS)
        if (now := beats()) != before:
            missed, before = 0, now
        elif missed is not None:
            missed += 1


# --- orders ---------------------------------------------------------------------------------------------
# The supervisor's orders to a worker: by an environment variable, and by a file that may change later.

_ENGINES = "engines.json"
_REFUSED = "refused"


class Orders(msgspec.Struct, frozen=True):
    """The orders to one worker."""

    number: int  # from 1 to `of`
    of: int
    listeners: tuple[int, ...]  # descriptors of the listening sockets
    directory: str  # the supervisor's own directory, for sockets and the file of engines
    follows: bool = False  # it takes the place of a worker that ended
    recording_key: str = ""  # the workers' key of recordings, unless the settings have one

    @classmethod
    def take(cls) -> Orders | None:
        """This process's orders; None if it is no worker. What it starts does not inherit them. Raises
        SettingsError if the variable is there, but no supervisor of this process set it."""
        text = os.environ.pop(WORKER_VARIABLE, None)
        if text is None:
            return None
        try:
            orders = msgspec.json.decode(text, type=cls)
            is_socket = (stat.S_ISSOCK(os.fstat(number).st_mode) for number in orders.listeners)
            if Path(orders.directory).is_dir() and all(is_socket):
                return orders
        except (msgspec.DecodeError, ValueError, OSError):
            pass
        raise SettingsError(
            f"{WORKER_VARIABLE} is set, but this process is no worker of `kvpin serve --workers`: unset it"
        )

    def variable(self) -> dict[str, str]:
        """The environment variable that says so."""
        return {WORKER_VARIABLE: msgspec.json.encode(self).decode()}

    def sockets(self) -> list[socket.socket]:
        """The listening sockets."""
        taken = [socket.socket(fileno=number) for number in self.listeners]
        for listener in taken:
            listener.set_inheritable(False)
        return taken

    def settings(self, load: Callable[[], Settings]) -> Settings:
        """The settings of this worker: those of `load`, but the engines that kvpin starts run already, and
        the workers share their requests. Raises SettingsError, also if the supervisor has refused them."""
        directory = Path(self.directory)
        if (directory / _REFUSED).exists():
            raise SettingsError((directory / _REFUSED).read_text(encoding="utf-8"))
        settings = load()
        started = tuple(
            StartedSettings(**dict(engine), starting_file=starting_file(directory, engine.url))
            for engine in read_engines(directory / _ENGINES)
        )
        changes: dict[str, Any] = {"engines": (*settings.engines, *started), "managed": ()}
        changes["name"] = f"{settings.shown_name}/{self.number}"
        if settings.reuse and settings.exchange is None:
            changes["exchange"] = ExchangeSettings.model_validate({"url": f"unix:{self.directory}"})
        if settings.state_dir is not None:
            changes["state_dir"] = settings.state_dir / f"worker-{self.number}"
        if settings.record_traffic_key is None and self.recording_key:
            changes["record_traffic_key"] = SecretStr(self.recording_key)
        return settings.model_copy(update=changes)


def write_engines(directory: Path, specs: list[EngineSpec]) -> None:
    """Tells workers which engines the supervisor runs, when they read their settings next. Raises OSError."""
    text = json.dumps({"engines": [_described(spec) for spec in specs]})
    new = directory / f".{_ENGINES}"
    new.write_text(text, encoding="utf-8")
    new.rename(directory / _ENGINES)


def starting_file(directory: Path, url: str) -> Path:
    """The file that is there while the engine at that address is in its first start."""
    return directory / f"starting-{urlsplit(url).port}"


def write_refusal(directory: Path, error: str | None) -> None:
    """Tells workers why the supervisor refuses the settings as they are now; None if it takes them over.
    Raises OSError."""
    if error is None:
        (directory / _REFUSED).unlink(missing_ok=True)
    else:
        (directory / _REFUSED).write_text(error, encoding="utf-8")


def _described(spec: EngineSpec[Any]) -> dict[str, Any]:
    """An engine in the shape of the settings."""
    fields = {name: getattr(spec, name) for name in EngineSettings.model_fields}
    given = {**fields, **msgspec.structs.asdict(spec.options)}
    return {name: value for name, value in given.items() if value is not None}


# --- supervisor -----------------------------------------------------------------------------------------

log = structlog.get_logger(__name__)

# Wait before a worker is started again: at first, and at most. A worker that ran for `STEADY_S` begins anew.
BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
STEADY_S = 60.0
_BAD_SETTINGS = 2
_THIRD = 3
_INTERRUPTED = 130


class Workers:
    """The workers of one port, and the engines that they share."""

    def __init__(
        self,
        settings: Settings,
        load: Callable[[], Settings],
        listeners: list[socket.socket],
        *,
        watchdog: Watchdog | None = None,
    ) -> None:
        """`load` reads the settings again. `watchdog`: that of this process. Raises SettingsError if there is
        no place for the workers' sockets."""
        self._watchdog = watchdog
        self._silent_s = watchdog.silent_s if watchdog is not None else SILENT_S
        self._settings, self._load, self._listeners = settings, load, listeners
        self._directory = OwnDirectory()
        self._tasks = Supervisor()
        self._tally = ConnectionTally(self._directory.path, settings.workers)
        for number in range(1, settings.workers + 1):
            self._tally.leave(number)  # until it has started
        self._running: dict[int, Process] = {}
        follow = partial(self._tell, signal.SIGHUP)
        self._engines = SharedEngines(self._directory.path, self._tasks, follow, settings.workers)
        self._recording_key = secrets.token_hex()
        self._status = 0
        self._stops = 0
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Runs until SIGTERM or SIGINT; returns the exit status. Raises EngineSpecError."""
        loop = asyncio.get_running_loop()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, self._stop, each)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        if self._watchdog is not None:
            self._tasks.keep("watchdog", self._watchdog.run)
        try:
            self._engines.follow(self._settings)
            async with asyncio.TaskGroup() as group:
                for number in range(1, self._settings.workers + 1):
                    group.create_task(self._keep(number))
        finally:
            await self._engines.aclose()
            await self._tasks.stop()
            self._directory.remove()
        return self._status

    # --- workers ------------------------------------------------------------------------------------

    async def _keep(self, number: int) -> None:
        """Starts a worker, and starts it again whenever it ends, until kvpin stops."""
        backoff_s, follows = BACKOFF_S, False
        while not self._stopping.is_set():
            begun = time.monotonic()
            try:
                status = await self._run_once(number, follows=follows)
                error = end_of(status)
            except OSError as not_started:  # e.g. no memory or no file descriptor is free: one may be later
                status, error = None, f"it cannot be started: {not_started.strerror or not_started}"
            if self._stopping.is_set():
                return
            if status == _BAD_SETTINGS and not follows:
                self._status = status
                self._stop(signal.SIGTERM)
                return
            if time.monotonic() - begun >= STEADY_S:
                backoff_s = BACKOFF_S
            log.warning(
                "worker ended; it is started again", worker=number, error=error, restart_in_s=backoff_s
            )
            await within(backoff_s, self._stopping.wait())
            backoff_s, follows = min(2 * backoff_s, MAX_BACKOFF_S), True

    async def _run_once(self, number: int, *, follows: bool) -> int:
        """Runs a worker once; returns its exit status, −N for signal N. Raises OSError if it cannot start."""
        descriptors = tuple(listener.fileno() for listener in self._listeners)
        orders = Orders(
            number=number,
            of=self._settings.workers,
            listeners=descriptors,
            directory=str(self._directory.path),
            follows=follows,
            recording_key=self._recording_key,
        )
        process = await asyncio.create_subprocess_exec(
            *ends_with_parent([sys.executable, "-m", "proxy.cli", *sys.argv[1:]]),
            env={**os.environ, **orders.variable()},
            pass_fds=(*descriptors, self._directory.lock),
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which passes it on
        )
        self._running[number] = process
        self._tasks.start(f"watch of worker {number}", self._watch(number, process))
        if self._stopping.is_set():  # kvpin was told during the start
            process.terminate()
        log.info("worker started", worker=number, pid=process.pid)
        try:
            return await process.wait()
        finally:
            self._tasks.cancel(f"watch of worker {number}")
            del self._running[number]
            self._tally.leave(number)

    async def _watch(self, number: int, process: Process) -> None:
        """Kills a worker when it hangs."""
        await until_silent(partial(self._tally.beats, number), self._silent_s)
        log.error(
            "worker hangs: it is killed, and the answers that it was giving are lost",
            worker=number,
            pid=process.pid,
            silent_s=self._silent_s,
        )
        process.kill()

    def _tell(self, number: signal.Signals) -> None:
        for process in self._running.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def _stop(self, number: signal.Signals) -> None:
        """All workers stop; told again, they hurry."""
        self._stops += 1
        self._stopping.set()
        for listener in self._listeners:
            listener.close()  # the port closes when the last worker closes it
        self._tell(number)
        if self._stops >= _THIRD and number == signal.SIGINT:
            os._exit(_INTERRUPTED)

    # --- settings -----------------------------------------------------------------------------------

    def _reload(self) -> None:
        """Reads the settings again. If they cannot be used, nobody follows them, nor a worker that starts."""
        try:
            settings = self._load()
            check_reload(self._settings, settings, has_issued=bool(issued_keys(settings)))
            check(settings)
            write_refusal(self._directory.path, None)
            self._engines.follow(settings)
        except (SettingsError, EngineSpecError, OSError) as error:  # the directory may be full
            log.error("settings not reloaded: the old ones stay", error=str(error))  # noqa: TRY400 - one sentence
            with suppress(OSError):
                write_refusal(self._directory.path, str(error))
                self._tell(signal.SIGHUP)
        else:
            self._settings = settings.model_copy(update={"workers": self._settings.workers})


_ASK_S, _ASK_AGAIN_S = 2.0, 0.5
# The workers look every 2 s whether an engine is back (`MAX_BACKOFF_S` in `fleet/monitor.py`).
_CONNECT_S = 3.0


class SharedEngines:
    """Runs them, and writes down where they are for the workers."""

    def __init__(self, directory: Path, tasks: Supervisor, tell: Callable[[], None], workers: int) -> None:
        """`tell` has the workers read what was written. `workers`: how many there are."""
        self._directory, self._tasks, self._tell = directory, tasks, tell
        self._sockets = [str(socket_of(directory, number + 1)) for number in range(workers)]
        self._transport = HttpTransport()
        self._engines: dict[str, ManagedEngine] = {}
        self._entries: dict[str, EngineEntry] = {}
        self._ending = list[ManagedEngine]()
        self._turn = asyncio.Lock()

    def follow(self, settings: Settings) -> None:
        """Changes the engines to those of the settings, and tells the workers. One that leaves, or changes,
        goes on until the workers' requests on it have ended, for `graceful_shutdown_s` at most. Before that,
        one that leaves waits as long at most for those that join. Changed ones are replaced one after the
        other: the others serve meanwhile. Raises EngineSpecError if an engine cannot be used; then nothing
        changed; and OSError: there is no room to tell them."""
        write_engines(self._directory, [engine.spec for engine in self._engines.values()])
        changes = engine_changes(self._entries, managed_engines(settings))
        new = {
            entry.id: (entry, ManagedEngine(entry))
            for entry in (*changes.added, *changes.changed)
            if isinstance(entry, ManagedSettings)
        }
        grace_s = settings.graceful_shutdown_s
        joining = [new[entry.id][1] for entry in changes.added if entry.id in new]
        for name in changes.removed:
            del self._entries[name]
            old = self._engines.pop(name)
            self._tasks.start(f"end of engine {name} {id(old)}", self._end(old, grace_s, joining))
        for name, (entry, engine) in new.items():
            self._entries[name] = entry
            if name in self._engines:
                work = self._replace(entry, engine, grace_s)
                self._tasks.start(f"turn of engine {name} {id(engine)}", work)
            else:
                self._engines[name] = engine
                self._run(engine)
        self._publish()

    async def aclose(self) -> None:
        """Stops them."""
        await asyncio.gather(*(engine.stop() for engine in self._engines.values()))
        await self._transport.aclose()

    async def _replace(self, entry: EngineEntry, new: ManagedEngine, grace_s: float) -> None:
        """Puts an engine in the place of the one of its id, and waits until it is healthy. A machine may not
        have room for both."""
        async with self._turn:
            if self._entries.get(entry.id) is not entry:  # the settings have changed again
                return
            old, self._engines[entry.id] = self._engines[entry.id], new
            self._publish()
            await self._end(old, grace_s)
            if self._engines.get(entry.id) is not new:  # it was removed meanwhile
                return
            self._run(new)
            ready = ProcessState.READY
            await until(lambda: new.state is ready or self._entries.get(entry.id) is not entry)
            await asyncio.sleep(_CONNECT_S)

    async def _end(self, old: ManagedEngine, grace_s: float, joining: Collection[ManagedEngine] = ()) -> None:
        """Stops an engine once the workers have left it, but not later than `grace_s` from now. Before that,
        they use it until they have reached those that join, but not longer than so."""
        self._ending.append(old)
        try:
            await until(lambda: all(each.state is ProcessState.READY for each in joining), grace_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    while await self._is_used(old.spec.url):  # noqa: ASYNC110 - it is asked
                        await asyncio.sleep(_ASK_AGAIN_S)
            await old.stop()
        finally:
            self._ending.remove(old)

    async def _is_used(self, url: str) -> bool:
        """False once every worker says that it has left the engine at that address."""
        to, sockets = self._transport, self._sockets
        answers = await ask(to, sockets, "POST", USES_PATH, body=url.encode(), within_s=_ASK_S)
        return len(answers) < len(sockets) or any(each.body for each in answers)

    async def _end_start(self, engine: ManagedEngine, file: Path) -> None:
        """Removes the file of an engine's first start once it is healthy, or has ended."""
        await until(lambda: not engine.starting)
        file.unlink(missing_ok=True)  # noqa: ASYNC240 - once, and empty

    def _run(self, engine: ManagedEngine) -> None:
        self._tasks.start(f"engine {engine.id} {id(engine)}", self._start(engine))

    async def _start(self, engine: ManagedEngine) -> None:
        """Runs an engine once each process that had its id has ended: a machine may not have room for
        both."""
        await until(lambda: all(each.id != engine.id for each in self._ending if each is not engine))
        if self._engines.get(engine.id) is engine:  # it was not removed meanwhile
            await engine.run()

    def _publish(self) -> None:
        for engine in self._engines.values():
            if engine.starting and not (file := starting_file(self._directory, engine.spec.url)).exists():
                file.touch()
                name = f"first start of engine {engine.id} {id(engine)}"
                self._tasks.start(name, self._end_start(engine, file))
        write_engines(self._directory, [engine.spec for engine in self._engines.values()])
        self._tell()


# What comes after the place: the directory's name (`tempfile` adds 8 characters), and the longest name in it.
_PREFIX = "kvpin-"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")
_MORE_BYTES = len(f"/{_PREFIX}12345678/.0123456789abcdef.sock")


class OwnDirectory:
    """A directory that only its owner may open.

    While it is there, it is locked: systemd-tmpfiles removes old files of temporary directories, but nothing
    below a directory with a lock (tmpfiles.d(5)). Workers hold the lock, too: the directory of a supervisor
    that was killed is in use until the last of them has ended. The next supervisor removes it."""

    def __init__(self) -> None:
        """Makes it. Raises SettingsError if that is not possible."""
        for place in dict.fromkeys(_places()):
            _remove_left_in(place)
        self.path = _made()
        self.lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Removes it, with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def _made() -> Path:
    """A new directory in the first place that allows it: sockets need short paths, and TMPDIR may be long."""
    for place in _places():
        if len(os.fsencode(place)) + _MORE_BYTES <= MAX_PATH_BYTES:
            try:
                return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
            except OSError:
                continue
    raise SettingsError(
        f"workers have no place for their sockets: TMPDIR must name a directory that can be written, with a "
        f"path of at most {MAX_PATH_BYTES - _MORE_BYTES} bytes"
    )


def _places() -> Iterator[str]:
    yield tempfile.gettempdir()
    if "XDG_RUNTIME_DIR" in os.environ:
        yield os.environ["XDG_RUNTIME_DIR"]
    yield from ("/tmp", "/dev/shm")  # noqa: S108 - `mkdtemp` makes a name that nobody knows


def _remove_left_in(place: str) -> None:
    """Removes those of killed supervisors: of this user, with files of workers, and without a lock."""
    for path in Path(place).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # a lock, or another supervisor removes it
            is_left = path.lstat().st_uid == os.geteuid() and (path / TALLY).exists()
            if not is_left or not _NAME.fullmatch(path.name):
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
