"""Measures a cold start of kvpin in front of four vLLM-like engines: time, log lines and memory.

    unresolvable   the engines name a model that no hub resolves, as on a machine without a network
    large          the engines name a local directory with a vocabulary of 150,000 entries

The engines are tests/fake_engines/vllm.py on real sockets, all four in a process of their own; they have a
tokenizer. kvpin is started once they serve. An engine "takes requests" once it has answered one.

    python benchmarks/cold_start.py [--watch-s 30] [--vocabulary 150000]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from harness import ROOT, free_port
from large_tokenizer import large_tokenizer

sys.path.insert(0, str(ROOT))

from tests.fake_engines import text

ENGINES = 4
START_S = 90.0
STOP_S = 10.0
POLL_S = 0.02
NOWHERE = "acme/none"
# The top-level domain is reserved never to resolve (RFC 2606).
NO_HUB = {"HF_ENDPOINT": "http://hub.invalid"}


@dataclass
class ColdStart:
    """Figures of one start. Seconds since kvpin was started; memory in MB.

    Attributes:
        ready_s: when /health/ready answered 200.
        all_ready_s: when every engine was listed as ready.
        all_served_s: when every engine had answered a request.
        tokenised_by: who tokenises at the end.
        log_lines: lines kvpin logged while it was watched.
        rss, peak_rss: of the kvpin process, at the end and at most.
        tree_rss: at most, with the processes it starts.
        cpu_served_s: CPU of kvpin until every engine had answered; on an idle machine about the time.
        cpu_s: of kvpin and its children, to the end.
    """

    name: str
    ready_s: float | None = None
    all_ready_s: float | None = None
    all_served_s: float | None = None
    tokenised_by: str = ""
    log_lines: int = 0
    rss: int = 0
    peak_rss: int = 0
    tree_rss: int = 0
    cpu_served_s: float = 0.0
    cpu_s: float = 0.0


def serve_engines(tokenizer: Path, root: str) -> None:
    """Serves four engines; prints their addresses; ends with its standard input."""
    text.MODEL_DIR = tokenizer
    from tests.fake_engines.vllm import running_vllm  # noqa: PLC0415 - after the tokenizer is chosen

    with ExitStack() as stack:
        engines = [stack.enter_context(running_vllm(root=root)) for _ in range(ENGINES)]
        print(json.dumps([engine.url for engine in engines]), flush=True)
        sys.stdin.read()


@contextmanager
def engines(tokenizer: Path, root: str) -> Iterator[list[str]]:
    """The engines in a process of their own; yields their addresses."""
    command = [sys.executable, __file__, "--serve", str(tokenizer), root]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield json.loads(process.stdout.readline() if process.stdout else "")
        process.communicate()


def measure(name: str, tokenizer: Path, root: str, watch_s: float) -> ColdStart:
    """Starts kvpin over the engines and watches it for `watch_s` seconds."""
    with engines(tokenizer, root) as urls, tempfile.TemporaryDirectory() as directory:
        port, log = free_port(), Path(directory) / "log"
        command = [sys.executable, "-m", "proxy.cli", "serve", "--port", str(port)]
        command += [word for url in urls for word in ("--engine", f"vllm={url}")]
        environment = {**os.environ, **NO_HUB, "ENABLE_KV_CACHE_REUSE": "1"}
        with log.open("wb") as output:
            started = time.monotonic()
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
        try:
            result = _watch(ColdStart(name), process, f"http://127.0.0.1:{port}", started, watch_s)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        result.log_lines = len(log.read_bytes().splitlines())
        print(log.read_text(), file=sys.stderr)
        return result


def _watch(
    result: ColdStart, process: subprocess.Popen[bytes], url: str, started: float, watch_s: float
) -> ColdStart:
    served: set[str] = set()
    with httpx.Client(base_url=url, timeout=30) as client, ThreadPoolExecutor(2 * ENGINES) as clients:
        while time.monotonic() < started + watch_s or result.all_served_s is None:
            if process.poll() is not None or time.monotonic() > started + START_S:
                break
            result.tree_rss = max(result.tree_rss, sum(map(_rss, _tree(process.pid))))
            try:
                health = client.get("/health/ready")
            except httpx.TransportError:
                time.sleep(POLL_S)
                continue
            now = time.monotonic() - started
            if result.ready_s is None and health.status_code == httpx.codes.OK:
                result.ready_s = now
            states = list(health.json()["engines"].values())
            if result.all_ready_s is None and states == ["ready"] * ENGINES:
                result.all_ready_s = now
            if result.all_served_s is None and "ready" in states:
                served.update(filter(None, clients.map(lambda n: _ask(client, n), range(2 * ENGINES))))
                if len(served) == ENGINES:
                    result.all_served_s = time.monotonic() - started
                    result.cpu_served_s = _cpu_s(process.pid, children=False)
            time.sleep(POLL_S)
        stats = client.get("/admin/v1/stats").json()
    result.tokenised_by = str([pool["tokenisation"] for pool in stats["pools"]])
    result.rss, result.peak_rss = _rss(process.pid), _rss(process.pid, "VmHWM")
    result.cpu_s = _cpu_s(process.pid)
    return result


def _ask(client: httpx.Client, number: int) -> str | None:
    """The engine that answered a new chat."""
    words = f"question {number} at {time.monotonic_ns()}"
    body = {"model": "tiny", "messages": [{"role": "user", "content": words}], "max_tokens": 1}
    return client.post("/v1/chat/completions", json=body).headers.get("x-kvpin-engine")


def _rss(pid: int, field: str = "VmRSS") -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    return int(found[1]) // 1024 if found else 0


def _tree(pid: int) -> list[int]:
    """A process and its children; those end within seconds and have none."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [pid, *(int(child) for task in tasks for child in (task / "children").read_text().split())]
    except OSError:
        return [pid]


def _cpu_s(pid: int, *, children: bool = True) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if children else 13])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measures both starts and prints them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--watch-s", type=float, default=30.0)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--serve", nargs=2, metavar=("TOKENIZER", "ROOT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_engines(Path(options.serve[0]), options.serve[1])
        return
    large = large_tokenizer(options.vocabulary)
    cases = (("unresolvable", text.MODEL_DIR, NOWHERE), ("large", large, str(large)))
    for name, tokenizer, root in cases:
        result = measure(name, tokenizer, root, options.watch_s)
        print(json.dumps(result.__dict__, indent=2))


if __name__ == "__main__":
    main()
