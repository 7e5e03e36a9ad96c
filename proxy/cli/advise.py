"""`kvpin advise`: what would let more of recorded prompts come from cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from proxy.replay.advise import Advice, Saving

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
        typer.echo(f"kvpin: {error}", err=True)
        raise typer.Exit(_UNUSABLE) from error
    if not advice.requests:
        what = (
            "holds no text hashes: record chats, messages or responses, with this version of kvpin"
            if advice.unknown
            else "holds no request"
        )
        typer.echo(f"kvpin: {', '.join(map(str, recordings))}: {what}", err=True)
        raise typer.Exit(_UNUSABLE)
    if json:
        typer.echo(msgspec.json.encode(advice).decode())
    else:
        _show(advice, console())


def _show(advice: Advice, out: Console) -> None:
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
    titles = (
        title,
        saves,
        "of all tokens",
        "requests",
        "of all requests",
        *(("what to do",) if hints else ()),
    )
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
