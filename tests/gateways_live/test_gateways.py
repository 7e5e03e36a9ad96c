"""Two kvpins behind a real nginx, HAProxy or Envoy are restarted while requests flow. `scripts/test-gateways`
runs this, with the configurations of deploy/gateways, and shows what came of the requests."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from tests.engines import running_engine, served
from tests.processes import answers, wait_until

# In deploy/gateways/nginx.conf, and a little more.
FAIL_TIMEOUT_S = 2.5
PROGRAMS = Path(os.environ["GATEWAYS"])
CONFIGURATIONS = Path(__file__).parents[2] / "deploy" / "gateways"
# More than the gateways need to notice that a kvpin leaves, as docs/deploy.md says.
DRAIN_S = 5
CLIENTS = 8
# Answers of the clients between one restart and the next.
BETWEEN = 40
READY_S = 600


@dataclass
class Gateway:
    """How one of them is started, for a configuration in a directory of its own."""

    file: str
    command: list[str]
    edits: dict[str, str] = field(default_factory=dict)


# Debian's nginx would keep bodies and its log where only a system's own nginx may.
_NGINX = "http {\n  access_log off;\n" + "".join(
    f"  {kind}_temp_path HOME/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
)
# Its workers use the test's directory, as this user.
_USER = "user root root; " if os.geteuid() == 0 else ""
GATEWAYS = {
    "nginx": Gateway(
        "nginx.conf",
        [*("usr/sbin/nginx", "-p", "{home}", "-e", "stderr", "-c", "{file}"),
         *("-g", _USER + "daemon off; pid {home}/pid; error_log stderr;")],
        {"http {\n": _NGINX},
    ),
    "haproxy": Gateway("haproxy.cfg", ["usr/sbin/haproxy", "-db", "-f", "{file}"]),
    "envoy": Gateway("envoy.yaml", ["envoy", "-c", "{file}", "--use-dynamic-base-id", "-l", "warning"]),
}  # fmt: skip


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextmanager
def running(gateway, home, kvpins):
    """The gateway before kvpins on these ports; yields its address."""
    home.mkdir()
    port, file = free_port(), home / gateway.file
    text = (CONFIGURATIONS / gateway.file).read_text()
    for before, after in gateway.edits.items():
        assert before in text
        text = text.replace(before, after.replace("HOME", str(home)))
    for number, each in enumerate(kvpins, 1):
        text = re.sub(rf"(?<![\w-])kvpin-{number}:8000", f"127.0.0.1:{each}", text)
        text = text.replace(
            f"address: kvpin-{number}, port_value: 8000", f"address: 127.0.0.1, port_value: {each}"
        )
    listen = r"(listen |bind :|0\.0\.0\.0, port_value: )80\b"
    text, count = re.subn(listen, rf"\g<1>{port}", text)
    assert count == 1
    file.write_text(text)
    program, *words = (word.format(home=home, file=file) for word in gateway.command)
    libraries = ":".join(map(str, (PROGRAMS / "usr" / "lib").glob("*-linux-gnu")))
    log = home / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [PROGRAMS / program, *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(f"{url}/health/ready"), process, log, READY_S)
        yield url
    finally:
        process.terminate()
        process.wait(30)


class Gated:
    """An engine that ends its stream once the client says that it has the beginning."""

    def __init__(self):
        self.seen = threading.Event()

    def app(self):
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _models(self, _):
        return JSONResponse({"object": "list", "data": [{"id": "gated", "object": "model"}]})

    async def _chat(self, _):
        def stream():
            yield b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
            seen = self.seen.wait(30)
            text = b"b" if seen else b"nobody saw the beginning"
            yield (
                b'data: {"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":"stop"}]}\n\n' % text
            )
            yield b"data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")


class Replica:
    """A kvpin on a port of its own, which can be restarted."""

    def __init__(self, port, engines, log):
        self.port, self._engines, self._log = port, engines, log
        self._process = None

    def start(self):
        words = [word for engine in self._engines for word in ("--engine", engine)]
        command = [sys.executable, "-m", "proxy.cli", "serve", "--port", str(self.port), *words]
        environment = {**os.environ, "ENABLE_KV_CACHE_REUSE": "1", "KVPIN_DRAIN_S": str(DRAIN_S)}
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        ready = f"http://127.0.0.1:{self.port}/health/ready"
        wait_until(lambda: answers(ready), self._process, self._log, READY_S)

    def stop(self):
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            assert self._process.wait(READY_S) == 0


class Clients:
    """Clients that ask without a pause: half of them for streams, half on a new connection each time."""

    def __init__(self, url):
        self.outcomes, self.wrong = Counter(), []
        self._url, self._over, self._lock = url, threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(CLIENTS)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number):
        streams = number % 2 == 0
        limits = httpx.Limits(max_keepalive_connections=None if number % 4 < 2 else 0)
        with httpx.Client(base_url=self._url, timeout=120, trust_env=False, limits=limits) as client:
            turn = 0
            while not self._over.is_set():
                turn += 1
                question = f"Question {turn} of client {number}: what is a gateway?"
                body = {"model": "kvpin-tiny", "messages": [{"role": "user", "content": question}]}
                try:
                    answer = client.post(
                        "/v1/chat/completions", json={**body, "max_tokens": 24, "stream": streams}
                    )
                    is_whole = answer.text.endswith("data: [DONE]\n\n") if streams else answer.json()["usage"]
                    outcome = "ok" if answer.status_code == 200 and is_whole else answer.text[-300:]
                except httpx.HTTPError as error:
                    outcome = f"{type(error).__name__}: {error}"
                with self._lock:
                    self.outcomes["ok" if outcome == "ok" else "failed"] += 1
                    if outcome != "ok":
                        self.wrong.append(outcome)

    def until_answered(self, more):
        goal = self.outcomes.total() + more
        deadline = time.monotonic() + READY_S
        while self.outcomes.total() < goal:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture(scope="module")
def gated():
    return Gated()


@pytest.fixture(scope="module")
def engines(tmp_path_factory, gated):
    log = tmp_path_factory.mktemp("engine") / "log"
    with running_engine(log, "--kv-blocks", "512") as engine, served(gated.app()) as url:
        yield f"embedded={engine.url}", f"openai_compatible={url}"


@pytest.fixture(scope="module")
def replicas(engines, tmp_path_factory):
    home = tmp_path_factory.mktemp("kvpins")
    pair = [Replica(free_port(), engines, home / f"kvpin-{n}.log") for n in (1, 2)]
    with ExitStack() as stack:
        for replica in pair:
            replica.start()
            stack.callback(replica.stop)
        yield pair


@pytest.fixture(scope="module", params=sorted(GATEWAYS))
def gateway(request, replicas, tmp_path_factory):
    """Its name and its address."""
    home = tmp_path_factory.mktemp(request.param) / "home"
    with running(GATEWAYS[request.param], home, [replica.port for replica in replicas]) as url:
        yield request.param, url


def test_pieces_of_a_stream_pass_at_once(gateway, gated):
    gated.seen.clear()
    body = {"model": "gated", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    told = b""
    with httpx.stream("POST", f"{gateway[1]}/v1/chat/completions", json=body, timeout=60) as answer:
        for piece in answer.iter_bytes():
            told += piece
            gated.seen.set()
    assert answer.status_code == 200
    assert b'"b"' in told
    assert b"nobody" not in told


def test_a_rolling_restart_fails_no_request(gateway, replicas):
    name, url = gateway
    with Clients(url) as clients:
        clients.until_answered(BETWEEN)
        for replica in replicas:
            replica.stop()
            replica.start()
            clients.until_answered(BETWEEN)
    print(f"\n{name}: {clients.outcomes['ok']} requests answered, {clients.outcomes['failed']} failed")
    assert clients.wrong == []


def test_one_kvpin_is_enough(gateway, replicas):
    """Its port is closed for long: the gateway asks the other one."""
    name, url = gateway
    time.sleep(FAIL_TIMEOUT_S)  # nginx asks the one that was restarted last only then
    replicas[0].stop()
    try:
        with Clients(url) as clients:
            clients.until_answered(BETWEEN)
    finally:
        replicas[0].start()
    print(f"\n{name}, one kvpin away: {clients.outcomes['ok']} answered, {clients.outcomes['failed']} failed")
    assert clients.wrong == []
