"""The cost of a request in each router: CPU, time and memory of kvpin and others, in one run.

A router has one core; two mock engines and the load generator have another. These are C programs (`native/`),
so that neither is the limit; their share of the core is printed. The engines look like vLLMs to kvpin. They
answer at once and send no KV events: kvpin learns what they hold from their answers. The tokenizer has the
template of Qwen2.5 and as many entries, but is made from the standard library: no hub is needed. Peers are
installed on first use (`router_peers.py`). CPU is the kernel's count for the router and its descendants.

    python benchmarks/router_cost.py [--routers kvpin,sglang,…] [--loads 'small c1,…'] [--repeats 3]
                                     [--before CHECKOUT] [--out DIRECTORY] [--quick]

`--before` measures the kvpin of another checkout in the same run, too. Writes router_cost.md, router_cost.png
and router_cost.json to DIRECTORY, and prints the tables.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from cost_native import MockEngine, NativeError, check_machine, mock_engine, play, write_bodies
from cost_result import FIRST, NEXT, Figure, Figures, Memory, draw, markdown, quantile
from cost_routers import SUBJECTS, before, running
from cost_work import LOADS, Chats, Load
from harness import some_of
from large_tokenizer import QWEN_ENTRIES, QWEN_TEMPLATE, large_tokenizer
from process_cost import cpu_s, rss_mb
from router_peers import RouterUnavailableError

ENGINES = 2
QUICK = 16
WARM_UPS = 64


@dataclass(frozen=True, slots=True)
class WaveFiles:
    """The bodies of a wave, as files for the load generator."""

    count: int
    first: Path
    next: Path


@dataclass(slots=True)
class Spent:
    """Seconds that some waves took, summed: CPU of the router, the engines and the client, and wall time."""

    router_s: float = 0.0
    engines_s: float = 0.0
    client_s: float = 0.0
    wall_s: float = 0.0


class Bench:
    """Measures routers, with the same engines and the same bodies for all.

    Args:
        loads: what is sent.
        tokenizer: directory of the tokenizer.
        directory: for bodies and logs.
    """

    def __init__(self, loads: Sequence[Load], tokenizer: Path, directory: Path) -> None:
        self.found = Figures([], [], {}, [])
        self._loads = loads
        self._tokenizer = tokenizer
        self._directory = directory
        self._waves = {load.name: list(self._written(load, seed)) for seed, load in enumerate(loads)}
        warm_up = Load("warm-up", 100, 16, WARM_UPS, WARM_UPS)
        self._warm_up = next(self._written(warm_up, len(loads)))

    def measure(self, router: str, engines: Sequence[MockEngine]) -> None:
        """Starts a router, sends it all loads and notes what they cost.

        Raises:
            RouterUnavailableError: it cannot be installed or started.
        """
        with running(router, engines, self._tokenizer, self._directory) as (port, pid):
            start_mb = rss_mb(pid)
            play(port, 16, self._warm_up.count, self._warm_up.first)
            for load in self._loads:
                self._measure_load(router, load, engines, port, pid)
            self.found.memory.append(Memory(router, start_mb, rss_mb(pid)))

    def _measure_load(
        self, router: str, load: Load, engines: Sequence[MockEngine], port: int, pid: int
    ) -> None:
        for engine in engines:
            engine.pace(load.interval_us)
        turns = (FIRST, NEXT) if SUBJECTS[router].knows_chats and not load.chunks else (FIRST,)
        took: dict[str, list[int]] = {turn: [] for turn in turns}
        spent = {turn: Spent() for turn in turns}
        for wave in self._waves[load.name]:
            for turn in turns:
                bodies = wave.first if turn == FIRST else wave.next
                with _spending(spent[turn], pid, engines):
                    played = play(port, load.connections, wave.count, bodies)
                spent[turn].client_s += played.cpu_s
                spent[turn].wall_s += played.wall_s
                took[turn] += played.took_us
                if played.failed:
                    self.found.failures.append(
                        f"{router}, {load.name}: {played.failed} of {wave.count}: {played.errors[0]}"
                    )
        for turn in turns:
            if took[turn]:
                figure = _figure(router, load, turn, took[turn], spent[turn])
                self.found.figures.append(figure)
                print(
                    f"{router}, {load.name}, {turn}: {figure.cpu_us:,.0f} µs, "
                    f"p50 {figure.p50_ms:.2f} ms, p99 {figure.p99_ms:.2f} ms",
                    file=sys.stderr,
                )

    def _written(self, load: Load, seed: int) -> Iterator[WaveFiles]:
        chats = Chats(self._tokenizer, seed)
        for number, wave in enumerate(chats.waves(load)):
            files = WaveFiles(
                len(wave.first),
                self._directory / f"{load.name}-{number}-first",
                self._directory / f"{load.name}-{number}-next",
            )
            write_bodies(files.first, wave.first)
            write_bodies(files.next, wave.next)
            yield files


@contextmanager
def _spending(spent: Spent, pid: int, engines: Sequence[MockEngine]) -> Iterator[None]:
    """Adds the CPU that the router and the engines use meanwhile."""
    router, others = cpu_s(pid), sum(cpu_s(engine.process.pid) for engine in engines)
    yield
    spent.router_s += cpu_s(pid) - router
    spent.engines_s += sum(cpu_s(engine.process.pid) for engine in engines) - others


def _figure(router: str, load: Load, turn: str, took_us: Sequence[int], spent: Spent) -> Figure:
    count, others_s = len(took_us), spent.engines_s + spent.client_s
    return Figure(
        router=router,
        load=load.name,
        turn=turn,
        requests=count,
        cpu_us=1e6 * spent.router_s / count,
        p50_ms=quantile(took_us, 0.5) / 1000,
        p99_ms=quantile(took_us, 0.99) / 1000,
        per_s=count / spent.wall_s,
        others_us=1e6 * others_s / count,
        others_busy=others_s / spent.wall_s,
    )


def main() -> None:
    """Measures what was asked for; prints and writes it."""
    arguments = _arguments()
    try:
        check_machine()
        found = _measured(arguments)
    except NativeError as error:
        raise SystemExit(f"router_cost.py cannot measure here: {error}") from error
    text = markdown(found)
    print(text)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "router_cost.md").write_text(text, encoding="utf-8")
    (arguments.out / "router_cost.json").write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    draw(found, arguments.out / "router_cost.png")


def _measured(arguments: argparse.Namespace) -> Figures:
    loads = [load for load in LOADS if load.name in arguments.loads]
    if arguments.quick:
        loads = [load.shorter(QUICK) for load in loads]
    repeats = 1 if arguments.quick else arguments.repeats
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = Bench(loads, large_tokenizer(QWEN_ENTRIES, QWEN_TEMPLATE), directory)
        plain = [stack.enter_context(mock_engine()) for _ in range(ENGINES)]
        tokenizing = [stack.enter_context(mock_engine(tokenizes=True)) for _ in range(ENGINES)]
        for repeat in range(repeats):
            print(f"repeat {repeat + 1} of {repeats}, {time.strftime('%H:%M:%S')}", file=sys.stderr)
            for router in arguments.routers:
                try:
                    bench.measure(router, tokenizing if SUBJECTS[router].engines_tokenize else plain)
                except RouterUnavailableError as error:
                    bench.found.not_measured[router] = str(error)
                    print(f"{router}: not measured: {error}", file=sys.stderr)
    return bench.found


def _arguments() -> argparse.Namespace:
    names = [load.name for load in LOADS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--routers", type=some_of(SUBJECTS), default=list(SUBJECTS), help="some of " + ",".join(SUBJECTS)
    )
    parser.add_argument(
        "--before", type=Path, metavar="CHECKOUT", help="another checkout of kvpin, with its .venv"
    )
    parser.add_argument("--loads", type=some_of(names), default=names, help="some of " + ",".join(names))
    parser.add_argument("--repeats", type=int, default=3, help="all routers in turn, so many times (3)")
    parser.add_argument("--out", type=Path, default=Path("router_cost"), help="directory (router_cost)")
    parser.add_argument("--quick", action="store_true", help="one repeat, a sixteenth of the requests")
    arguments = parser.parse_args()
    if arguments.before is not None:
        others = before(arguments.before.resolve())
        SUBJECTS.update(others)
        arguments.routers += others
    return arguments


if __name__ == "__main__":
    main()
