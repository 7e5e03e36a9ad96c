"""The routers that are compared: how each is installed, and started for some engines.

Peers are real releases, each in its own virtual environment under `~/.cache/kvpin/routers`, made on first
use. Their flags are their defaults unless the name says otherwise.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness import CACHE, ROOT, free_port, wait_ready
from router_work import BLOCK_TOKENS, MODEL

READY_S = 60
_TICKS = os.sysconf("SC_CLK_TCK")


class RouterUnavailableError(Exception):
    """A router that cannot be installed or started; the message says why."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One that the routers share.

    Attributes:
        url: its address.
        events: where it publishes its KV events.
    """

    url: str
    events: str


@dataclass(frozen=True, slots=True)
class Router:
    """One way to route.

    Attributes:
        title: for tables.
        release: what pip installs; None for what needs no installation.
        flags: of its command line, before the addresses.
        session_header: the header with the session of a request; None if it gets none.
        checkout: of kvpin, if it is not this one; it has a `.venv`.
    """

    title: str
    release: str | None
    flags: tuple[str, ...] = ()
    session_header: str | None = None
    checkout: Path | None = None


_SGLANG, _VLLM = "sglang-router==0.3.2", "vllm-router==0.1.17"
_VLLM_SESSION = "x-session-id"
# An eighth of the difference in load that by default makes it give up the cache (64, and 1.5 times as many).
_TUNED = ("--balance-abs-threshold", "8", "--balance-rel-threshold", "1.2", "--cache-threshold", "0.5")

DIRECT, KVPIN, DYNAMO = "direct", "kvpin", "dynamo"
ROUTERS = {
    DIRECT: Router("no router, engines in turn", None),
    "sglang-cache": Router("sglang-router cache_aware", _SGLANG, ("--policy", "cache_aware")),
    "sglang-tuned": Router("sglang-router cache_aware, tuned", _SGLANG, ("--policy", "cache_aware", *_TUNED)),
    "sglang-session": Router(
        "sglang-router manual, session header", _SGLANG, ("--policy", "manual"), "x-smg-routing-key"
    ),
    "vllm-turn": Router("vllm-router round robin", _VLLM, ("--policy", "round_robin")),
    "vllm-cache": Router("vllm-router cache_aware", _VLLM, ("--policy", "cache_aware")),
    "vllm-kv": Router("vllm-router kv_aware", _VLLM, ("--policy", "kv_aware")),
    "vllm-kv-session": Router(
        "vllm-router kv_aware, session header",
        _VLLM,
        ("--policy", "kv_aware", "--kv-aware-session-affinity-ttl-secs", "600"),
        _VLLM_SESSION,
    ),
    "vllm-hash": Router("vllm-router consistent_hash", _VLLM, ("--policy", "consistent_hash")),
    "vllm-hash-session": Router(
        "vllm-router consistent_hash, session header", _VLLM, ("--policy", "consistent_hash"), _VLLM_SESSION
    ),
    "vllm-sticky-session": Router(
        "vllm-router sticky_least_loaded, session header",
        _VLLM,
        ("--policy", "sticky_least_loaded"),
        _VLLM_SESSION,
    ),
    "kvpin-off": Router("kvpin without reuse (least loaded)", None),
    KVPIN: Router("kvpin", None),
}  # fmt: skip


# Its engines are workers of its own (`dynamo_engine.py`), so that only `live_routers.py` compares it.
OF_DYNAMO = Router(
    "Dynamo 1.6.1, KV router, fastokens",
    "ai-dynamo==1.6.1",
    (
        *("--router-mode", "kv", "--tokenizer", "fastokens", "--kv-cache-block-size", str(BLOCK_TOKENS)),
        *("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"),
    ),
)
# What its frontend and its workers import. It also wants a planner's simulator, which has no wheels here.
_DYNAMO_NEEDS = (
    *("ai-dynamo-runtime==1.6.1", "aiohttp", "kubernetes<33", "msgspec", "prometheus-client", "pyzmq"),
    *("redis<9", "tqdm", "transformers", "zstandard", "uvloop"),
)


def install(*releases: str, alone: str = "") -> Path:
    """The virtual environment of some releases, made if it is not there; the first gives it its name.

    Args:
        releases: with all that they need.
        alone: one that gives the name instead, without what it needs.

    Raises:
        RouterUnavailableError: pip's last words.
    """
    release = alone or releases[0]
    home = CACHE / "routers" / release.replace("==", "-")
    done = home / "installed"
    if done.exists():
        return home
    print(f"installing {release} in {home}", file=sys.stderr)
    pip = [home / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-input"]
    commands = [[sys.executable, "-m", "venv", "--clear", home], [*pip, *releases]]
    for command in commands + ([[*pip, "--no-deps", alone]] if alone else []):
        ran = subprocess.run(command, check=False, capture_output=True, text=True)
        if ran.returncode:
            raise RouterUnavailableError(f"{release} cannot be installed: {_last_line(ran.stderr)}")
    done.touch()
    return home


def install_nginx() -> Path:
    """The nginx on the PATH, else Debian's package, unpacked without being installed.

    Raises:
        RouterUnavailableError: apt's last words.
    """
    installed = shutil.which("nginx")
    if installed is not None:
        return Path(installed)
    home = CACHE / "routers" / "nginx"
    binary = home / "usr" / "sbin" / "nginx"
    if not binary.exists():
        home.mkdir(parents=True, exist_ok=True)
        print(f"unpacking Debian's nginx in {home}", file=sys.stderr)
        for command in ("apt-get download nginx", "dpkg-deb -x nginx_*.deb ."):
            try:
                ran = subprocess.run(
                    ["sh", "-c", command], cwd=home, check=False, capture_output=True, text=True
                )
            except OSError as error:
                raise RouterUnavailableError(f"nginx cannot be unpacked: {error}") from error
            if ran.returncode:
                raise RouterUnavailableError(f"nginx cannot be unpacked: {_last_line(ran.stderr)}")
    return binary


@dataclass(frozen=True, slots=True)
class Start:
    """The way to start a router.

    Attributes:
        command: its command line.
        health: the route that answers 200 once it is ready.
        environment: what it needs beyond that of this process.
    """

    command: Sequence[str | Path]
    health: str
    environment: Mapping[str, str] = field(default_factory=dict)


def dynamo_engine() -> Start:
    """A mock engine that is a worker of Dynamo.

    Raises:
        RouterUnavailableError: it cannot be installed.
    """
    places = (ROOT, ROOT / "benchmarks", *(path for path in sys.path if path.endswith("site-packages")))
    environment = {"PYTHONPATH": os.pathsep.join(map(str, places)), "DYN_LOG": "off"}
    return Start([_dynamo(), ROOT / "benchmarks" / "dynamo_engine.py"], "/health", environment)


def _dynamo() -> Path:
    return install(*_DYNAMO_NEEDS, alone=str(OF_DYNAMO.release)) / "bin" / "python"


@contextmanager
def running(
    router: str, engines: Sequence[Engine], log: Path, core: int | None = None
) -> Iterator[tuple[str, Callable[[], float]]]:
    """Starts a router before the engines and ends it; yields its address and a look at its CPU seconds.
    `core` is the only one it may use.

    Raises:
        RouterUnavailableError: it is not ready in time; the message has the end of its log.
    """
    port = free_port()
    with started(router, start_of(router, engines, port), port, log, core) as process:
        yield f"http://127.0.0.1:{port}", lambda: cpu_s(process.pid)


@contextmanager
def started(
    name: str, start: Start, port: int, log: Path, core: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a router and ends it; `core` is the only one it may use.

    Raises:
        RouterUnavailableError: it is not ready in time; the message has the end of its log.
    """
    pinned = [] if core is None else ["taskset", "--cpu-list", str(core)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*pinned, *start.command],
            cwd=ROOT,
            env={**os.environ, **start.environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        try:
            wait_ready(f"http://127.0.0.1:{port}{start.health}", process, READY_S)
        except (RuntimeError, TimeoutError) as error:
            said = _last_line(log.read_text(errors="replace"))
            raise RouterUnavailableError(f"{name} did not start: {error}; it said: {said}") from error
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a group of its own, and those it started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(10)
        except ProcessLookupError:
            process.wait()
            return
        except subprocess.TimeoutExpired:
            continue


def cpu_s(group: int) -> float:
    """CPU seconds that the processes of a group have used."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


def start_of(router: str, engines: Sequence[Engine], port: int) -> Start:
    """The way to start one of `ROUTERS` in front of the engines.

    Raises:
        RouterUnavailableError: it cannot be installed.
    """
    known = ROUTERS[router]
    if known.release is None:
        checkout = known.checkout or ROOT
        python = checkout / ".venv" / "bin" / "python" if known.checkout else sys.executable
        command: list[str | Path] = [python, "-P", "-m", "proxy.cli", "serve", "--port", str(port)]
        for engine in engines:
            command += ["--engine", f"vllm={engine.url}"]
        environment = {"ENABLE_KV_CACHE_REUSE": str(int(router != "kvpin-off")), "PYTHONPATH": str(checkout)}
        return Start(command, "/health/ready", environment)
    if router == DYNAMO:
        command = [_dynamo(), "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
        return Start([*command, *known.flags], "/health")
    home = install(known.release)
    is_sglang = known.release == _SGLANG
    start = ["-m", "sglang_router.launch_router"] if is_sglang else ["-m", "vllm_router.launch_router"]
    command = [home / "bin" / "python", *start, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--log-level", "warn" if is_sglang else "warning"]
    command += ["--worker-urls", *(engine.url for engine in engines), *known.flags]
    if "kv_aware" in known.flags:
        command += ["--kv-event-model", MODEL, "--kv-event-block-size", str(BLOCK_TOKENS)]
        for engine in engines:
            command += ["--kv-event-source", f"{engine.url}={engine.events}"]
    return Start(command, "/health")


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "nothing"
