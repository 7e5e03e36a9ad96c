"""Commands that measure: `kvpin bench`, `kvpin top` and `kvpin advise`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proxy.cli.client import AdminClient, AdminError, JsonOption, base_of, fail, option, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from proxy.cli.load_test import Figures, RequestSample
    from proxy.replay.advise import Advice, Saving


# --- `kvpin bench` --------------------------------------------------------------------------------------

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
    """The options of `kvpin bench`: its load, and the server's model and key."""

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
    from proxy.cli.load_test import BenchError, figures, first_model  # noqa: PLC0415

    if not options.request_rate > 0:
        fail("--request-rate must be above 0; inf sends all at once")
    bases = [base_of(url) for url in urls]
    if len(set(bases)) < len(bases):
        fail("an address is given twice: name each server once")
    results: dict[str, Figures] = {}
    errors: list[str] = []
    for url, base in zip(urls, bases, strict=True):
        base_url = f"{base}/v1"
        try:
            model = options.model or asyncio.run(first_model(base_url, options.api_key))
            samples, seconds = _measure(base_url, replace(options, model=model))
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


def _measure(base_url: str, load: BenchOptions) -> tuple[list[RequestSample], float]:
    """Runs the load, with a progress bar on a terminal; raises BenchError."""
    from proxy.cli.grid import bars  # noqa: PLC0415 - see above
    from proxy.cli.load_test import run  # noqa: PLC0415 - see above

    with bars() as progress:
        task = progress.add_task(base_url, total=load.num_prompts)
        return asyncio.run(run(base_url, load, secrets.token_hex(4), lambda: progress.advance(task)))


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


# --- `kvpin top` ----------------------------------------------------------------------------------------

_AGAIN_S = 1.0


def top(*, kvpin: AdminClient) -> None:
    """Watch engines, and requests as they pass, until Ctrl-C.

    Where the output is no terminal, it prints the engines once.
    """
    from rich.live import Live  # noqa: PLC0415 - slow to import

    from proxy.cli.decisions import TopView  # noqa: PLC0415 - likewise
    from proxy.cli.grid import console  # noqa: PLC0415 - likewise

    out, view = console(), TopView(kvpin.url)
    try:
        events = kvpin.events("/events")
        first = next(events, None)
        if first is None:
            fail(f"{kvpin.url} sends no events: it is no kvpin, or is about to stop")
        view.take(*first)
        if not out.is_terminal:
            out.print(view)
            return
        with Live(view, console=out, screen=True, refresh_per_second=4):
            while True:
                try:
                    for name, event in events:
                        view.take(name, event)
                    view.problem = "kvpin ended the stream of events; trying again"
                except AdminError as error:
                    view.problem = f"{error}; trying again"
                time.sleep(_AGAIN_S)
                events = kvpin.events("/events")
    except AdminError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


# --- `kvpin advise`: what would let more of recorded prompts come from cache ----------------------------

_UNUSABLE = 2
# Where a prompt left the one before it → what its client can do.
_CLIENTS = {
    "tools": "send the same tools in the same order for a whole session",
    "system": "keep the system prompt for a whole session; put what changes into the last message",
    "input": "only append messages: do not shorten, reorder or rewrite earlier ones",
}


def advise(
    recordings: Annotated[
        list[Path],
        typer.Argument(
            metavar="RECORDING…",
            help="Of `kvpin serve --record-traffic`, plain or .gz; several that kvpins made at one time.",
        ),
    ],
    *,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what would let more of recorded prompts come from cache.

    Judges each rule that can change prompts, and what clients change themselves, by the tokens that it would
    have saved. Exit status 2: a recording cannot be used.
    """
    import msgspec  # noqa: PLC0415 - the other commands start quicker without

    from proxy.cli.grid import console  # noqa: PLC0415 - likewise
    from proxy.replay import advise as module  # noqa: PLC0415 - likewise
    from proxy.replay.trace import TraceError  # noqa: PLC0415 - likewise

    try:
        advice = module.advise(module.read_recordings(*recordings))
    except TraceError as error:
        fail(str(error), _UNUSABLE)
    if not advice.requests:
        what = (
            "holds no text hashes: record chats, messages or responses, with this version of kvpin"
            if advice.unknown
            else "holds no request"
        )
        fail(f"{', '.join(map(str, recordings))}: {what}", _UNUSABLE)
    if json:
        typer.echo(msgspec.json.encode(advice).decode())
    else:
        _show_advice(advice, console())


def _show_advice(advice: Advice, out: Console) -> None:
    share = advice.cached_tokens / advice.tokens
    out.print(
        f"{advice.requests:,} requests with {advice.tokens:,} prompt tokens. A cache that keeps everything "
        f"has {share:.1%} of them."
    )
    if advice.unknown:
        out.print(f"{advice.unknown:,} more requests are left out: kvpin does not know their text.")
    _table("rule", advice.rules, advice, out, "No rule changes any of these prompts.", {})
    if advice.rules:
        out.print("Each rule alone; all: every rule together. `kvpin serve --normalise RULE` chooses one.")
    for client, rules in advice.clients.items():
        saved = ", ".join(f"{name} saves {saving.tokens:,.0f} tokens" for name, saving in rules.items())
        out.print(f"{client}: {saved}.")
    if advice.alone == advice.requests:
        nothing = (
            "No request names its session, so what clients change is not known: let them send session_id or "
            "prompt_cache_key, one for each conversation."
        )
    else:
        nothing = "No session changes what it sent before."
        if advice.alone:
            nothing += f" {advice.alone:,} requests name no session, and were not compared."
    _table("the client changes", advice.changes, advice, out, nothing, _CLIENTS)


def _table(
    title: str,
    savings: Mapping[str, Saving],
    advice: Advice,
    out: Console,
    nothing: str,
    hints: Mapping[str, str],
) -> None:
    from proxy.cli.grid import TerminalTable  # noqa: PLC0415 - see `advise`

    out.print()
    if not savings:
        out.print(nothing)
        return
    saves = "costs at most" if hints else "saves"
    titles = (title, saves, "of all tokens", "requests", "of all requests", *["what to do"] * bool(hints))
    table = TerminalTable(titles, text="what to do", numbers=titles[1:5])
    for name, saving in savings.items():
        cells = (
            f"{saving.tokens:,.0f}",
            f"{saving.tokens / advice.tokens:.1%}",
            f"{saving.requests:,}",
            f"{saving.requests / advice.requests:.1%}",
        )
        table.add(name, *cells, *((hints[name],) if hints else ()))
    table.print(out)
