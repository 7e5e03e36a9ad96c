"""The routers of `router_cost.py`, and how each is started before the mock engines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from cost_native import ROUTER_CORE, MockEngine
from harness import free_port
from router_peers import (
    Engine,
    RouterUnavailableError,
    Start,
    install,
    install_nginx,
    start_of,
    started,
)

# Where the programs of this virtual environment are.
PROGRAMS = Path(sys.executable).parent
ASGI = ("aiohttp==3.14.5", "uvicorn[standard]==0.54.0")
# For the tokenizer to be loaded and checked.
SETTLED_S = 300.0
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Place:
    """The address and the engines of a router.

    Attributes:
        port: to listen on.
        engines: addresses of the engines.
        directory: for its files.
        tokenizer: directory of the model's tokenizer.
    """

    port: int
    engines: Sequence[str]
    directory: Path
    tokenizer: Path


@dataclass(frozen=True, slots=True)
class Subject:
    """One router that is measured.

    Attributes:
        title: for tables.
        start: how it is started.
        engines_tokenize: its engines have `/tokenize`.
        tokenised_by: what kvpin has to report before it is measured; "" if nothing.
        knows_chats: the next turns of chats are measured, too.
        has_goals: kvpin's goals hold for it.
    """

    title: str
    start: Callable[[Place], Start]
    engines_tokenize: bool = False
    tokenised_by: str = ""
    knows_chats: bool = False
    has_goals: bool = False


@contextmanager
def running(
    name: str, engines: Sequence[MockEngine], tokenizer: Path, directory: Path
) -> Iterator[tuple[int, int]]:
    """Starts a router on its core; yields its port and process id once it is ready.

    Raises:
        RouterUnavailableError: it cannot be installed or started.
    """
    subject, port = SUBJECTS[name], free_port()
    start = subject.start(Place(port, [engine.url for engine in engines], directory, tokenizer))
    with started(name, start, port, directory / f"{name}.log", ROUTER_CORE) as process:
        if subject.tokenised_by:
            _wait_tokenised(port, subject.tokenised_by)
        yield port, process.pid


def _wait_tokenised(port: int, source: str) -> None:
    deadline, found = time.monotonic() + SETTLED_S, None
    while time.monotonic() < deadline:
        stats = httpx.get(f"http://127.0.0.1:{port}/admin/v1/stats", timeout=SETTLED_S)
        pools = stats.raise_for_status().json()["pools"]
        found = pools[0]["tokenisation"] if pools else None
        if found is not None and found["source"] == source:
            return
        time.sleep(POLL_S)
    raise RouterUnavailableError(f"kvpin's prompts are not tokenised by {source!r}: {found}")


def _kvpin(*, reuse: bool, own_tokenizer: bool, programs: Path = PROGRAMS) -> Callable[[Place], Start]:
    def start(place: Place) -> Start:
        command: list[str | Path] = [programs / "kvpin", "serve", "--port", str(place.port)]
        option = f",tokenizer={place.tokenizer}" if own_tokenizer else ""
        for url in place.engines:
            command += ["--engine", f"vllm={url}{option}"]
        return Start(command, "/health/ready", {"ENABLE_KV_CACHE_REUSE": str(int(reuse))})

    return start


def _peer(router: str) -> Callable[[Place], Start]:
    def start(place: Place) -> Start:
        return start_of(router, [Engine(url, "") for url in place.engines], place.port)

    return start


def _asgi(place: Place) -> Start:
    python = install(*ASGI) / "bin" / "python"
    hop = Path(__file__).with_name("asgi_hop.py")
    return Start([python, hop, str(place.port), *place.engines], "/health")


def _nginx(place: Place) -> Start:
    home = place.directory / "nginx"
    home.mkdir(exist_ok=True)
    configuration = home / "nginx.conf"
    servers = "".join(f"server {url.removeprefix('http://')};" for url in place.engines)
    configuration.write_text(NGINX.format(home=home, servers=servers, port=place.port), encoding="utf-8")
    return Start([install_nginx(), "-p", home, "-c", configuration], "/health")


NGINX = """
daemon off;
worker_processes 1;
pid {home}/nginx.pid;
error_log {home}/nginx-error.log crit;
worker_rlimit_nofile 16384;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    client_body_temp_path {home};
    proxy_temp_path {home};
    fastcgi_temp_path {home};
    uwsgi_temp_path {home};
    scgi_temp_path {home};
    keepalive_requests 10000000;
    client_body_buffer_size 1m;
    client_max_body_size 64m;
    upstream engines {{ least_conn; {servers} keepalive 256; keepalive_requests 10000000; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://engines;
            proxy_http_version 1.1;
            proxy_set_header connection "";
            proxy_buffering off;
        }}
    }}
}}
"""

KVPIN = "kvpin"
SUBJECTS = {
    KVPIN: Subject(
        "kvpin, reuse on",
        _kvpin(reuse=True, own_tokenizer=True),
        tokenised_by="local",
        knows_chats=True,
        has_goals=True,
    ),
    "kvpin-engine": Subject(
        "kvpin, the engines tokenise",
        _kvpin(reuse=True, own_tokenizer=False),
        engines_tokenize=True,
        tokenised_by="engine",
    ),
    "kvpin-off": Subject("kvpin, reuse off", _kvpin(reuse=False, own_tokenizer=False), has_goals=True),
    "sglang": Subject("sglang-router 0.3.2 cache_aware", _peer("sglang-cache")),
    "vllm": Subject("vllm-router 0.1.17 cache_aware", _peer("vllm-cache")),
    "nginx": Subject("nginx", _nginx),
    "asgi": Subject("plain ASGI + aiohttp", _asgi),
}


def before(checkout: Path) -> dict[str, Subject]:
    """The subjects for another checkout of kvpin, which has a `.venv` of its own."""
    return {
        f"{name}-before": replace(
            SUBJECTS[name],
            title=SUBJECTS[name].title.replace("kvpin", "kvpin before", 1),
            start=_kvpin(
                reuse=name == KVPIN, own_tokenizer=name == KVPIN, programs=checkout / ".venv" / "bin"
            ),
        )
        for name in (KVPIN, "kvpin-off")
    }
