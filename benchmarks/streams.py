"""Many concurrent streams through one kvpin: memory of each, how late chunks are, whether any is lost.

Two mock engines send each stream ten chunks a second. All streams stay open together for as long as asked.
kvpin has one core; the engines and the client have another (C programs, `native/`). Each chunk says when the
engine sent it, and the client notes how long it took. Loop lag is kvpin's own metric, where it has it. Beside
it stands the time of a health request.

    python benchmarks/streams.py [--streams 2000,5000,10000] [--seconds 60] [--prompt-tokens 1000]
                                 [--no-reuse] [--json PATH] [--quick]

A row whose chunks arrive at less than 99% of the engines' pace shows more streams than these cores feed.
"""

from __future__ import annotations

import argparse
import http.client
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import msgspec
from cost_native import (
    MockEngine,
    NativeError,
    Played,
    check_machine,
    client_command,
    mock_engine,
    play,
    write_bodies,
)
from cost_result import quantile, quantile_of_counts
from cost_routers import running
from cost_work import Chats, Load
from large_tokenizer import QWEN_ENTRIES, QWEN_TEMPLATE, large_tokenizer
from process_cost import cpu_s, rss_mb
from prometheus_client.parser import text_string_to_metric_families
from router_peers import RouterUnavailableError

ENGINES = 2
INTERVAL_S = 0.1
OPEN_PER_S = 200
# Nobody waits for the last one: the engines are told when to finish.
ENDLESS_CHUNKS = 1_000_000
# Files of kvpin: a connection to a client and one to an engine for each stream, and some of its own.
FILES_PER_STREAM, OTHER_FILES = 2, 500
PROBE_S = 0.1
WARM_UPS, WARM_UP_CLIENTS = 200, 4
LAG = "kvpin_loop_lag_seconds"
COLUMNS = (
    "streams",
    "for s",
    "memory before → open, MB",
    "KB a stream",
    "chunks/s, of those sent",
    "chunk late p50 / p99 / worst, ms",
    "loop lag p99, ms",
    "health request p99, ms",
    "dropped",
    "kvpin's core",
    "other core",
)


class Held(msgspec.Struct, frozen=True):
    """Figures of one number of streams.

    Attributes:
        streams: number of streams that were open at once.
        seconds: time for which all of them were open.
        before_mb, open_mb, most_mb: resident memory of kvpin: before, with all streams open, and at most.
        chunks_per_s: chunks that the client got per second meanwhile.
        late_p50_ms, late_p99_ms, late_worst_ms: delay from the engine's write to the client's read.
        lag_p99_ms: kvpin's loop lag; None if it has no such metric.
        probe_p99_ms: time of a health request.
        dropped: streams that failed or ended early.
        first_error: what was wrong with the first of them.
        kvpin_busy, others_busy: share of their cores.
    """

    streams: int
    seconds: float
    before_mb: float
    open_mb: float
    most_mb: float
    chunks_per_s: float
    late_p50_ms: float
    late_p99_ms: float
    late_worst_ms: float
    lag_p99_ms: float | None
    probe_p99_ms: float
    dropped: int
    first_error: str
    kvpin_busy: float
    others_busy: float


def hold_streams(
    streams: int, seconds: float, prompt_tokens: int, router: str, tokenizer: Path, engines: list[MockEngine]
) -> Held:
    """Opens streams through a fresh kvpin and watches it until they end.

    Raises:
        RouterUnavailableError, NativeError: something does not start.
    """
    for engine in engines:
        engine.pace(round(INTERVAL_S * 1e6))
    load = Load("streams", prompt_tokens, streams, streams, streams, ENDLESS_CHUNKS)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bodies, warm_ups = directory / "bodies", directory / "warm-ups"
        chats = Chats(tokenizer, 0)
        write_bodies(bodies, next(chats.waves(load)).first)
        write_bodies(warm_ups, next(chats.waves(Load("", prompt_tokens, 1, WARM_UPS, WARM_UPS))).first)
        port, pid = stack.enter_context(running(router, engines, tokenizer, directory))
        play(port, WARM_UP_CLIENTS, WARM_UPS, warm_ups)
        before_mb = rss_mb(pid)
        client = subprocess.Popen(
            client_command(port, streams, streams, bodies, OPEN_PER_S), stdout=subprocess.PIPE, text=True
        )
        stack.callback(client.kill)
        said = client.stdout.readline() if client.stdout is not None else ""
        if said != "open\n":
            why = msgspec.json.decode(said, type=Played).errors if said else ["the load generator failed"]
            raise NativeError(f"{streams} streams were never open at once: {'; '.join(why)}.")
        return _watched(client, streams, seconds, before_mb, port, pid, engines)


def _watched(
    client: subprocess.Popen[str],
    streams: int,
    seconds: float,
    before_mb: float,
    port: int,
    pid: int,
    engines: list[MockEngine],
) -> Held:
    """Measures for `seconds` with all streams open, then ends them."""
    others = [client.pid, *(engine.process.pid for engine in engines)]
    lag, began, open_mb = _lag(port), time.monotonic(), rss_mb(pid)
    kvpin_s, others_s = cpu_s(pid), sum(map(cpu_s, others))
    most_mb = open_mb
    with _probing(port) as probes:
        while time.monotonic() < began + seconds and client.poll() is None:
            time.sleep(1)
            most_mb = max(most_mb, rss_mb(pid))
    took = time.monotonic() - began
    kvpin_s, others_s = cpu_s(pid) - kvpin_s, sum(map(cpu_s, others)) - others_s
    lag_p99 = _lag_p99(lag, _lag(port))
    for engine in engines:
        engine.finish()
    ended, _ = client.communicate()
    played = msgspec.json.decode(ended, type=Played)
    return Held(
        streams=streams,
        seconds=played.window_s,
        before_mb=before_mb,
        open_mb=open_mb,
        most_mb=most_mb,
        chunks_per_s=played.chunks / played.window_s if played.window_s else 0.0,
        late_p50_ms=quantile_of_counts(played.delays_us, 0.5) / 1000,
        late_p99_ms=quantile_of_counts(played.delays_us, 0.99) / 1000,
        late_worst_ms=played.worst_delay_us / 1000,
        lag_p99_ms=lag_p99,
        probe_p99_ms=quantile(probes, 0.99) * 1000,
        dropped=played.failed,
        first_error=played.errors[0] if played.errors else "",
        kvpin_busy=kvpin_s / took,
        others_busy=others_s / took,
    )


@contextmanager
def _probing(port: int) -> Iterator[list[float]]:
    """Asks for kvpin's health every 0.1 s meanwhile; yields the seconds of each answer."""
    taken: list[float] = []
    ended = threading.Event()

    def probe() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while not ended.wait(PROBE_S):
            begun = time.perf_counter()
            connection.request("GET", "/health/live")
            connection.getresponse().read()
            taken.append(time.perf_counter() - begun)
        connection.close()

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield taken
    finally:
        ended.set()
        thread.join()


def _lag(port: int) -> dict[float, int]:
    """Counts of kvpin's loop lag up to each bound in seconds; empty without the metric."""
    page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {
        float(sample.labels["le"]): int(sample.value) for sample in samples if sample.name == f"{LAG}_bucket"
    }


def _lag_p99(before: dict[float, int], after: dict[float, int]) -> float | None:
    """In ms, of what was counted between two readings."""
    counts, below = [], 0
    for bound in sorted(after):
        until = after[bound] - before.get(bound, 0)
        counts.append((bound * 1000, until - below))
        below = until
    return quantile_of_counts(counts, 0.99) if below else None


def markdown(rows: list[Held]) -> str:
    """The table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---:|" * len(COLUMNS)]
    for row in rows:
        lag = "–" if row.lag_p99_ms is None else f"≤ {row.lag_p99_ms:,.1f}"
        cells = [
            f"{row.streams:,}",
            f"{row.seconds:.0f}",
            f"{row.before_mb:,.0f} → {row.open_mb:,.0f}",
            f"{1000 * (row.most_mb - row.before_mb) / row.streams:,.1f}",
            f"{row.chunks_per_s:,.0f}, {row.chunks_per_s * INTERVAL_S / row.streams:.1%}",
            f"{row.late_p50_ms:,.1f} / {row.late_p99_ms:,.1f} / {row.late_worst_ms:,.0f}",
            lag,
            f"{row.probe_p99_ms:,.1f}",
            f"{row.dropped} {row.first_error}".rstrip(),
            f"{row.kvpin_busy:.0%}",
            f"{row.others_busy:.0%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def raise_file_limit(files: int) -> None:
    """Lets this process and its children open `files` files.

    Raises:
        NativeError: this user may not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, files), max(hard, files)))
    except (OSError, ValueError) as error:
        raise NativeError(
            f"{files} open files are needed and {hard} are allowed: raise `ulimit -n`."
        ) from error


def main() -> None:
    """Holds each number of streams and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--streams", default="2000,5000,10000", help="how many at once, one run for each (2000,5000,10000)"
    )
    parser.add_argument("--seconds", type=float, default=60, help="with all streams open (60)")
    parser.add_argument("--prompt-tokens", type=int, default=1000, help="of each request (1000)")
    parser.add_argument("--no-reuse", action="store_true", help="kvpin with reuse off")
    parser.add_argument("--json", type=Path, default=None, help="file for all figures")
    parser.add_argument("--quick", action="store_true", help="200 streams for 5 s")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.streams, arguments.seconds = "200", 5.0
    numbers = [int(number) for number in arguments.streams.split(",")]
    rows = []
    try:
        check_machine()
        raise_file_limit(FILES_PER_STREAM * max(numbers) + OTHER_FILES)
        tokenizer = large_tokenizer(QWEN_ENTRIES, QWEN_TEMPLATE)
        router = "kvpin-off" if arguments.no_reuse else "kvpin"
        with ExitStack() as stack:
            engines = [stack.enter_context(mock_engine()) for _ in range(ENGINES)]
            for number in numbers:
                rows.append(
                    hold_streams(
                        number, arguments.seconds, arguments.prompt_tokens, router, tokenizer, engines
                    )
                )
                print(rows[-1], file=sys.stderr)
    except (NativeError, RouterUnavailableError) as error:
        raise SystemExit(f"streams.py cannot go on: {error}") from error
    finally:
        if rows:
            print(markdown(rows))
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)))


if __name__ == "__main__":
    main()
