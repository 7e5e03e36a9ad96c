"""Where kvpin's CPU goes: a profile of small chats, long chats and streams, in µs per request.

py-spy (installed on first use) samples a kvpin that has a core to itself, while the mock engines and the load
generator of `router_cost.py` use the other. Each sample counts for the package of its innermost Python frame.
Shares are scaled to the CPU per request, which the kernel counts meanwhile. What C code does counts for the
Python frame that called it; the event loop's own work, sockets included, for `event loop`.

    python benchmarks/router_profile.py [--router kvpin] [--loads 'small c16,long c16,SSE 64'] [--seconds 10]
                                        [--out DIRECTORY]

Also writes the folded stacks of each load to DIRECTORY, for speedscope or flamegraph.pl.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from cost_native import MockEngine, NativeError, check_machine, mock_engine, pinned, play, write_bodies
from cost_routers import KVPIN, SUBJECTS, running
from cost_work import LOADS, Chats, Load
from harness import ROOT, some_of
from large_tokenizer import QWEN_ENTRIES, QWEN_TEMPLATE, large_tokenizer
from process_cost import cpu_s
from router_peers import RouterUnavailableError, install

PY_SPY = "py-spy==0.4.1"
SAMPLES_PER_S = 200
WARM_UPS = 256
PROFILED = ("small c16", "long c16", "SSE 64")
OTHER_CORE = 1
# Rows of the table; the rest is one row.
ROWS = 30
# A thread of an executor that waits for work; py-spy takes it for busy.
_IDLE = ("_worker (", "concurrent/futures/thread.py")
_LOOP = ("asyncio/runners.py", "asyncio/base_events.py", "asyncio/events.py", "uvloop/__init__.py")


def main() -> None:
    """Profiles the loads and prints the table."""
    arguments = _arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    loads = [load for load in LOADS if load.name in arguments.loads]
    columns: dict[str, Mapping[str, float]] = {}
    try:
        check_machine()
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            tokenizes = SUBJECTS[arguments.router].engines_tokenize
            engines = [stack.enter_context(mock_engine(tokenizes=tokenizes)) for _ in range(2)]
            tokenizer = large_tokenizer(QWEN_ENTRIES, QWEN_TEMPLATE)
            port, pid = stack.enter_context(running(arguments.router, engines, tokenizer, directory))
            for load in loads:
                stacks = arguments.out / f"{arguments.router}-{load.name.replace(' ', '-')}.folded"
                waves = Waves(load, tokenizer, directory)
                cost = _record(waves, engines, port, pid, arguments.seconds, stacks)
                columns[load.name] = scaled(by_package(stacks.read_text(encoding="utf-8")), cost)
    except (NativeError, RouterUnavailableError) as error:
        raise SystemExit(f"router_profile.py cannot profile here: {error}") from error
    print(markdown(columns))


class Waves:
    """Endless requests of a load, each new."""

    def __init__(self, load: Load, tokenizer: Path, directory: Path) -> None:
        self.load = load
        self._chats = Chats(tokenizer, 0)
        self._bodies = directory / "bodies"

    def play(self, port: int, requests: int | None = None) -> int:
        """Sends one wave, or this many requests; returns how many were answered."""
        count = requests or self.load.wave
        first = next(self._chats.waves(Load("", self.load.tokens, 1, count, count, self.load.chunks))).first
        write_bodies(self._bodies, first)
        return len(play(port, self.load.connections, count, self._bodies).took_us)


def _record(
    waves: Waves, engines: Sequence[MockEngine], port: int, pid: int, seconds: float, stacks: Path
) -> float:
    """Samples a process while requests run; returns its CPU per request in µs."""
    for engine in engines:
        engine.pace(waves.load.interval_us)
    waves.play(port, min(WARM_UPS, waves.load.wave))
    py_spy = install(PY_SPY) / "bin" / "py-spy"
    command = [py_spy, "record", "--pid", str(pid), "--duration", str(round(seconds))]
    command += ["--rate", str(SAMPLES_PER_S), "--format", "raw", "--full-filenames", "--output", stacks]
    answered, began = 0, cpu_s(pid)
    with subprocess.Popen(
        pinned(OTHER_CORE, *command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as sampler:
        while sampler.poll() is None:
            answered += waves.play(port)
        spent = cpu_s(pid) - began
        said = sampler.stdout.read() if sampler.stdout is not None else ""
    if sampler.returncode or not stacks.exists():
        raise NativeError(f"py-spy failed: {said.strip()}")
    if not answered:
        raise NativeError(f"no request of {waves.load.name} was answered")
    return 1e6 * spent / answered


def by_package(folded: str) -> Counter[str]:
    """Samples of each package, from folded stacks: `function (file:line);function (file:line);… count`."""
    counts: Counter[str] = Counter()
    for line in folded.splitlines():
        stack, _, count = line.rpartition(" ")
        frame = stack.rpartition(";")[2]
        if not (frame.startswith(_IDLE[0]) and _IDLE[1] in frame):
            counts[_package(frame)] += int(count)
    return counts


def _package(frame: str) -> str:
    """The package of a frame: two folders of kvpin, a library's name, or a module of the standard library."""
    path = frame.rpartition("(")[2].rstrip(")").rpartition(":")[0]
    if not path.startswith("/"):
        return "generated code"
    if path.endswith(_LOOP):
        return "event loop"
    _, is_installed, below = path.rpartition("site-packages/")
    if is_installed:
        return below.split("/")[0].removesuffix(".py")
    if path.startswith(f"{ROOT}/"):
        return "/".join(path.removeprefix(f"{ROOT}/").split("/")[:3]).removesuffix(".py")
    return path.rpartition("/lib/")[2].partition("/")[2].removesuffix(".py") or path


def scaled(counts: Mapping[str, int], total: float) -> dict[str, float]:
    """Counts as parts of a total."""
    samples = sum(counts.values())
    return {name: total * count / samples for name, count in counts.items()} if samples else {}


def markdown(columns: Mapping[str, Mapping[str, float]]) -> str:
    """A row for each package, most expensive first."""
    names = {name for column in columns.values() for name in column}
    ranked = sorted(names, key=lambda name: -max(column.get(name, 0) for column in columns.values()))
    lines = ["| µs per request | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]

    def add(title: str, members: Sequence[str]) -> None:
        sums = [sum(column.get(name, 0) for name in members) for column in columns.values()]
        lines.append(f"| {title} | " + " | ".join(f"{value:,.0f}" for value in sums) + " |")

    for name in ranked[:ROWS]:
        add(f"`{name}`" if "/" in name else name, [name])
    if ranked[ROWS:]:
        add("everything else", ranked[ROWS:])
    add("**all**", ranked)
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    kvpins = [name for name in SUBJECTS if name.startswith(KVPIN)]
    names = [load.name for load in LOADS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--router", choices=kvpins, default=KVPIN)
    parser.add_argument(
        "--loads", type=some_of(names), default=list(PROFILED), help="some of " + ",".join(names)
    )
    parser.add_argument("--seconds", type=float, default=10, help="of each load (10)")
    parser.add_argument("--out", type=Path, default=Path("router_profile"), help="directory (router_profile)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
