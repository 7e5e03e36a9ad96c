"""How many machine instructions kvpin needs for a request: the judge of its hot path on a busy machine.

Requests are sent one after the other, with the mock engines and the load generator of `router_cost.py`.
kvpin runs under valgrind, which counts its instructions in user space; what an idle kvpin needs in the same
time is subtracted. The counts do not depend on what else the machine does.

    apt-get install valgrind
    python benchmarks/instructions.py [--shapes whole,next,…] [--requests 192] [--before CHECKOUT]
                                      [--peers asgi,nginx,sglang,vllm]

`--before` counts those of another checkout of kvpin, too, which has a `.venv`, and `--peers` those of other
routers that are one process, installed on first use (`router_peers.py`). Take a multiple of 64 requests: a
refit of learned rates, 10 million instructions, comes once per 64 answers. A Python that was built without
profile-guided optimisation needs about 10% more than Debian's, so name it with each figure.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import router_peers
from call_count import CHUNKS, ENGINES, FOLLOWS_S, HEALTH_S, INTERVAL_US, LONG, SHORT, Shape, play_all
from cost_native import MockEngine, NativeError, check_machine, mock_engine, write_bodies
from cost_routers import KVPIN, PROGRAMS, SUBJECTS, Place, running
from cost_work import Chats, Load
from harness import ROOT, some_of
from large_tokenizer import QWEN_ENTRIES, QWEN_TEMPLATE, large_tokenizer
from router_peers import RouterUnavailableError, Start

WARM_UPS = 320
NGINX = "nginx"
PEERS = ("asgi", NGINX, "sglang", "vllm")
# kvpin starts slowly under valgrind.
READY_S = 600.0
IDLE_S = 10.0
_TOTALS = re.compile(r"^(?:summary|totals): *(\d+)", re.MULTILINE)


def shapes(requests: int) -> dict[str, Shape]:
    """All shapes by name."""

    def load(tokens: int, chunks: int = 0, interval_us: int = 0) -> Load:
        return Load("", tokens, 1, requests, requests, chunks, interval_us)

    return {
        "whole": Shape("small, whole answer", load(SHORT)),
        "next": Shape("small, its next turn", load(SHORT), is_next=True),
        "long": Shape(f"{LONG} tokens", load(LONG)),
        "burst": Shape(f"small, a stream of {CHUNKS} pieces at once", load(SHORT, CHUNKS)),
        "paced": Shape(f"small, a stream of {CHUNKS} pieces one by one", load(SHORT, CHUNKS, INTERVAL_US)),
    }


class Subject:
    """A router under valgrind, which writes each count to a file that begins with `out`."""

    def __init__(self, port: int, pid: int, out: Path) -> None:
        self.port, self._pid, self._out, self._dumps = port, pid, out, 0
        self._control("-i", "on")

    def per_request(self, bodies: Path, count: int) -> float:
        """Sends requests; returns the instructions for each."""

        def work() -> None:
            play_all(self.port, bodies, count)
            time.sleep(FOLLOWS_S)

        (busy, seconds), (idle, idle_s) = self._counted(work), self._counted(lambda: time.sleep(IDLE_S))
        return (busy - idle / idle_s * seconds) / count

    def _counted(self, work: Callable[[], object]) -> tuple[int, float]:
        """The instructions during `work`, and its seconds."""
        self._control("-z")
        began = time.monotonic()
        work()
        seconds = time.monotonic() - began
        self._control("-d")
        self._dumps += 1
        dumped = Path(f"{self._out}.{self._dumps}").read_text(encoding="utf-8", errors="replace")
        return sum(int(each) for each in _TOTALS.findall(dumped)[-1:]), seconds

    def _control(self, *options: str) -> None:
        command = ["callgrind_control", *options, str(self._pid)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NativeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def main() -> None:
    """Counts and prints."""
    arguments = _arguments()
    wanted = {name: shape for name, shape in shapes(arguments.requests).items() if name in arguments.shapes}
    checkouts = {"now": ROOT} | ({"before": arguments.before.resolve()} if arguments.before else {})
    subjects = {name: partial(_kvpin, checkout) for name, checkout in checkouts.items()}
    subjects |= {name: partial(_peer, name) for name in arguments.peers}
    found: dict[str, dict[str, float]] = {}
    router_peers.READY_S = READY_S
    try:
        check_machine()
        _check_valgrind()
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            engines = [stack.enter_context(mock_engine()) for _ in range(ENGINES)]
            tokenizer = large_tokenizer(QWEN_ENTRIES, QWEN_TEMPLATE)
            for name, start in subjects.items():
                found[name] = _counts(name, start, wanted, engines, tokenizer, directory / name)
    except (NativeError, RouterUnavailableError) as error:
        raise SystemExit(f"instructions.py cannot count here: {error}") from error
    print(f"Million instructions per request, Python {sys.version.split()[0]} at {sys.base_prefix}\n")
    print("| shape | " + " | ".join(found) + " |\n|---|" + "---:|" * len(found))
    for name, shape in wanted.items():
        figures = [found[each][name] / 1e6 for each in found]
        print(f"| {shape.title} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |")


def _check_valgrind() -> None:
    if shutil.which("callgrind_control") is None:
        raise NativeError("it needs valgrind: apt-get install valgrind")


def _counts(
    router: str,
    start: Callable[[Place], Start],
    wanted: dict[str, Shape],
    engines: Sequence[MockEngine],
    tokenizer: Path,
    directory: Path,
) -> dict[str, float]:
    """The instructions for each shape, in a router."""
    directory.mkdir()
    out, name, found = directory / "callgrind", f"{router}-valgrind", dict[str, float]()
    known = SUBJECTS.get(router, SUBJECTS[KVPIN])
    SUBJECTS[name] = replace(known, start=lambda place: _under_valgrind(start(place), out))
    with running(name, engines, tokenizer, directory) as (port, pid):
        subject = Subject(port, pid, out)
        for seed, (shape, asked) in enumerate(wanted.items()):
            chats, load, bodies = Chats(tokenizer, seed), asked.load, directory / shape
            warm = next(chats.waves(replace(load, requests=WARM_UPS, wave=WARM_UPS)))
            for each in (warm.first, warm.next) if asked.is_next else (warm.first,):
                write_bodies(bodies, each)
                play_all(subject.port, bodies, len(each))
            for engine in engines:
                engine.pace(load.interval_us)
            wave = next(chats.waves(load))
            write_bodies(bodies, wave.first)
            if asked.is_next:
                play_all(subject.port, bodies, load.wave)
                write_bodies(bodies, wave.next)
            found[shape] = subject.per_request(bodies, load.wave)
            for engine in engines:
                engine.pace(0)
            print(f"{router}, {shape}: {found[shape] / 1e6:.3f} M", file=sys.stderr)
    return found


def _under_valgrind(start: Start, out: Path) -> Start:
    """The same under valgrind, which counts nothing until it is told."""
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
    return replace(start, command=[*valgrind, *start.command])


def _kvpin(checkout: Path, place: Place) -> Start:
    """The start of the kvpin of a checkout."""
    start = SUBJECTS[KVPIN].start(place)
    python = checkout / PROGRAMS.relative_to(ROOT) / "python"
    return replace(
        start,
        command=[python, "-P", "-m", "proxy.cli", *start.command[1:]],
        environment={
            **start.environment,
            "KVPIN_HEALTH__INTERVAL_S": HEALTH_S,
            "KVPIN_HEALTH__TIMEOUT_S": "120",
            "PYTHONPATH": str(checkout),
        },
    )


def _peer(name: str, place: Place) -> Start:
    """The start of a peer, as one process."""
    start = SUBJECTS[name].start(place)
    return replace(start, command=[*start.command, "-g", "master_process off;"]) if name == NGINX else start


def _arguments() -> argparse.Namespace:
    names = list(shapes(1))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=some_of(names), default=names, help="some of " + ",".join(names))
    parser.add_argument("--requests", type=int, default=192, help="of each shape (192)")
    parser.add_argument(
        "--before", type=Path, metavar="CHECKOUT", help="another checkout of kvpin, with its .venv"
    )
    parser.add_argument("--peers", type=some_of(PEERS), default=[], help="some of " + ",".join(PEERS))
    return parser.parse_args()


if __name__ == "__main__":
    main()
