"""`kvpin bench`."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Annotated

import typer

from proxy.cli.client import JsonOption, base_of, fail, print_json
from proxy.cli.options import option

if TYPE_CHECKING:
    from proxy.cli.load_test import BenchTarget, Figures, RequestSample, Workload

_TITLES = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "duration": "Benchmark duration (s)",
    "total_input_tokens": "Total input tokens",
    "cached_input_tokens": "Cached input tokens",
    "total_output_tokens": "Total generated tokens",
    "request_throughput": "Request throughput (req/s)",
    "output_throughput": "Output token throughput (tok/s)",
    "total_token_throughput": "Total token throughput (tok/s)",
    **{
        f"{name}_{kind}_ms": f"{name.title()} {kind.upper()} (ms)"
        for kind in ("ttft", "tpot", "itl", "e2el")
        for name in ("mean", "median", "p99")
    },
}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of `kvpin bench`."""

    model: str | None = option("NAME", "The model [the first listed].")
    api_key: str | None = option("KEY", "The client's key.", envvar="OPENAI_API_KEY")
    num_prompts: int = option("N", "Requests.", 100, min=1)
    num_prefixes: int = option("N", "Different prefixes among them.", 10, min=1)
    prefix_len: int = option("N", "Words of a prefix.", 1000, min=0)
    suffix_len: int = option("N", "Words of each request's own end.", 50, min=1)
    output_len: int = option("N", "The most tokens of an answer.", 32, min=1)
    max_concurrency: int = option("N", "The most requests at a time.", 8, min=1)
    request_rate: float = option("PER_S", "Requests a second, at random times; inf: all at once.", inf)
    seed: int = option("N", "Of words, order and times.", 0)


def bench(
    urls: Annotated[
        list[str],
        typer.Argument(
            metavar="URL", help="Addresses of kvpins or engines, with /v1 or without; several are compared."
        ),
    ],
    *,
    options: BenchOptions,
    as_json: JsonOption = False,
) -> None:
    """Measure streamed chats whose prompts share prefixes.

    It tells TTFT, TPOT, ITL, E2EL and cached tokens. To see what reuse gains, compare a kvpin that has it
    on with one that has it off. Every address gets the same prompts under prefixes of its own, which no
    cache holds yet. Exit status 1: a request failed.
    """
    from proxy.cli.load_test import BenchError, BenchTarget, Workload, figures, first_model  # noqa: PLC0415

    if not options.request_rate > 0:
        fail("--request-rate must be above 0; inf sends all at once")
    bases = [base_of(url) for url in urls]
    if len(set(bases)) < len(bases):
        fail("an address is given twice: name each server once")
    load = Workload(**{name: getattr(options, name) for name in Workload.__slots__})
    results: dict[str, Figures] = {}
    errors: list[str] = []
    for url, base in zip(urls, bases, strict=True):
        base_url = f"{base}/v1"
        try:
            name = options.model or asyncio.run(first_model(base_url, options.api_key))
            target = BenchTarget(base_url, name, options.api_key, options.output_len, options.max_concurrency)
            samples, seconds = _measure(target, load)
        except BenchError as error:
            fail(str(error))
        results[url] = figures(samples, seconds)
        errors += [f"{url}: {sample.error}" for sample in samples if sample.error]
    if as_json:
        print_json(results)
    else:
        _show(results)
    if errors:
        fail(f"{len(errors)} requests failed, the first one: {errors[0]}")


def _measure(target: BenchTarget, load: Workload) -> tuple[list[RequestSample], float]:
    """Runs the load, with a progress bar on a terminal; raises BenchError."""
    from rich.console import Console  # noqa: PLC0415 - see above
    from rich.progress import Progress  # noqa: PLC0415 - see above

    from proxy.cli.load_test import run  # noqa: PLC0415 - see above

    err = Console(stderr=True)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(target.base_url, total=load.num_prompts)
        return asyncio.run(run(target, load, secrets.token_hex(4), lambda: progress.advance(task)))


def _show(results: dict[str, Figures]) -> None:
    """Prints a column for each address."""
    from proxy.cli.grid import TerminalTable, console  # noqa: PLC0415 - see above

    table = TerminalTable(("", *results), numbers=tuple(results))
    for name, title in _TITLES.items():
        table.add(title, *(_written(each[name]) for each in results.values()))
    table.print(console(), header=len(results) > 1)


def _written(value: float | None) -> str:
    if value is None:
        return "unknown"
    return str(value) if isinstance(value, int) else f"{value:.2f}"
