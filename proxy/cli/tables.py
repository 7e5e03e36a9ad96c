"""Answers of the admin API as tables for people."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from proxy.cli.grid import Grid, console, of_state


def show_engines(answer: dict[str, Any]) -> None:
    """Prints one row per engine."""
    _show_engines(answer["engines"])


def _show_engines(engines: list[dict[str, Any]]) -> None:
    table = Grid(
        ("engine", "kind", "address", "state", "model", "view", "in flight", "served", "last error"),
        text="last error",
        less=("served", "kind", "view", "in flight", "model"),
    )
    for engine in engines:
        table.add(
            engine["id"],
            engine["kind"],
            engine["url"],
            of_state(engine["state"]),
            engine["model"] or "",
            of_state(engine["trust"]),
            str(engine["in_flight"]),
            str(engine["served"]),
            " ".join((engine["last_error"] or "").split()),
        )
    table.print(console())


def show_stats(stats: dict[str, Any]) -> None:
    """Pools, engines, pins, totals."""
    out, exchange, totals = console(), stats["exchange"], stats["totals"]
    for pool in stats["pools"]:
        _show_pool(out, pool, is_shared=exchange is not None)
    _show_unconnected(out, stats)
    if stats["pins"]:
        _show_pins(out, stats["pins"])
    if exchange is not None:
        _show_exchange(out, exchange)
    elsewhere = f" and {totals['elsewhere']} used through another kvpin" if totals["elsewhere"] else ""
    out.print(
        f"{totals['ready']} of {totals['engines']} engines ready{elsewhere}, "
        f"{totals['in_flight']} requests in flight, {totals['served']} served; "
        f"reuse is {'on' if stats['reuse'] else 'off'}"
    )


def _show_pool(out: Console, pool: dict[str, Any], *, is_shared: bool) -> None:
    """The engines of a pool. `is_shared`: there are other kvpins, which may own some of them."""
    table = Grid(
        ("engine", "state", "view", "gpu", "host", "disk", "in flight", "served", "exact", "cached"),
        text="view",
        less=("disk", "host", "served", "cached", "exact"),
        title=f"{pool['model']}: {pool['index_entries']} blocks of {pool['tokens_per_block']} tokens",
    )
    for engine in pool["engines"]:
        audit, blocks = engine["audit"], engine["blocks"]
        table.add(
            engine["id"],
            of_state(engine["state"]),
            of_state(engine["trust"], f" ({engine['why']})"),
            *(str(blocks[tier]) for tier in ("gpu", "host", "disk")),
            str(engine["in_flight"]),
            str(engine["served"]),
            f"{audit['exact']} of {audit['checked']}",
            f"{audit['reported_tokens']} tokens",
        )
    table.print(out)
    if pool["tokenisation"] is not None:
        out.print(pool["tokenisation"]["detail"], markup=False)
    for engine in pool["engines"]:
        _show_slots(out, engine)
        if is_shared and engine["owner"] is not None:
            out.print(f"{engine['id']}: used only by this kvpin, {engine['owner']}", markup=False)


def _show_pins(out: Console, pins: list[dict[str, Any]]) -> None:
    table = Grid(("pin", "target", "engines", "blocks", "ends in"), text="engines")
    for pin in pins:
        ends, engines = f"{pin['expires_in_s']:.0f} s", ", ".join(pin["engines"])
        table.add(pin["pin_id"], pin["target"], engines, str(pin["blocks"]), ends)
    table.print(out)


def _show_unconnected(out: Console, stats: dict[str, Any]) -> None:
    """The engines that another kvpin uses for this one, and those that nobody can use here."""
    lost = []
    for engine in stats["unconnected"]:
        if engine["state"] != "elsewhere" or engine["last_error"] is not None:
            lost.append(engine)
            continue
        said = f"{engine['id']}: used through the kvpin {engine['owner']}, which answers its requests"
        out.print(f"{said}: {stats['passed_on'].get(engine['owner'], 0)} so far", markup=False)
    if lost:
        out.print("not connected:")
        _show_engines(lost)


def show_prompt_tables(answer: dict[str, Any]) -> None:
    """Prints one row per prompt table."""
    columns = ("table", "rows", "hidden", "bytes", "extra id")
    table = Grid(columns, less=("extra id",), numbers=("rows", "hidden", "bytes"))
    for each in answer["prompt_tables"]:
        counts = (str(each[name]) for name in ("rows", "hidden", "bytes", "extra_id"))
        table.add(each["table_id"], *counts)
    table.print(console())


def show_prompt_table(prompt_table: dict[str, Any]) -> None:
    """Prints one prompt table, and how a request names it."""
    show_prompt_tables({"prompt_tables": [prompt_table]})
    out, last = console(), prompt_table["rows"] - 1
    out.print(
        f'\nA request to /v1/completions names it with "prompt_table": "{prompt_table["table_id"]}". In its '
        f"prompt, a list of token ids, row 0 is the id that equals the vocabulary size; row {last} is that "
        f"plus {last}.",
        markup=False,
    )


def _show_exchange(out: Console, exchange: dict[str, Any]) -> None:
    """The other kvpins."""
    if not exchange["connected"]:
        out.print("the exchange is gone: this kvpin goes on alone")
    table = Grid(
        ("peer", "engines shared", "in flight", "in step", "round trip", "heard", "gaps", "divergences")
    )
    for peer in exchange["peers"]:
        table.add(
            peer["name"],
            str(peer["engines"]),
            str(peer["in_flight"]),
            "yes" if peer["in_step"] else "no",
            _round_trip(peer),
            f"{peer['silent_s']:.1f} s ago",
            str(peer["gaps"]),
            str(peer["divergences"]),
        )
    if exchange["peers"]:
        table.print(out)


def _round_trip(peer: dict[str, Any]) -> str:
    """How long a message to another kvpin and back takes, and whether its load counts."""
    seconds = peer["round_trip_s"]
    if seconds is None:
        return "–"
    return f"{1000 * seconds:.0f} ms" + (", behind" if peer["behind"] else "")


def _show_slots(out: Console, engine: dict[str, Any]) -> None:
    """The slots and files of an engine that has some, and its findings."""
    kv = engine["kv"]
    if kv.get("slots"):
        columns = ("slot", "tokens", "unknown", "in a file", "runs", "pinned for")
        table = Grid(columns, title=f"slots of {engine['id']}")
        for slot in kv["slots"]:
            counts = (str(slot[name]) for name in ("id", "tokens", "unknown", "saved"))
            pinned = f"{slot['pinned_s']:.0f} s" if slot["pinned_s"] else ""
            table.add(*counts, slot["operation"] or "", pinned)
        table.print(out)
    for tier, held in kv.get("files", {}).get("tiers", {}).items():
        out.print(
            f"{engine['id']}: {held['entries']} files on {tier}, "
            f"{held['bytes'] / 2**20:.0f} of {held['cap'] / 2**20:.0f} MiB"
        )
    for finding in engine.get("findings", []):
        out.print(f"{engine['id']}: {finding}", markup=False)


def show_operation(operation: dict[str, Any]) -> None:
    """Prints what an operation did, by engine."""
    out = console()
    columns = ("engine", "verb", "state", "blocks", "bytes", "left", "error")
    table = Grid(columns, text="error", less=("verb", "bytes"))
    for part in operation["engines"]:
        left = ", ".join(f"{count} {reason}" for reason, count in part["left"].items() if count)
        table.add(
            part["engine"],
            part["verb"],
            of_state(part["state"]),
            f"{part['done']} of {part['total']}",
            str(part["bytes"]),
            left,
            part["error"] or "",
        )
    if operation["engines"]:
        table.print(out)
    for name, value in operation["result"].items():
        out.print(f"{name}: {value}", markup=False)
    if operation["note"]:
        out.print(operation["note"], markup=False)


@contextmanager
def progress_bar(verb: str) -> Iterator[Any]:
    """A progress bar on standard error; nothing where that is not a terminal."""
    err = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("blocks"))
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        bars: dict[str, TaskID] = {}

        def show(operation: dict[str, Any]) -> None:
            for part in operation["engines"]:
                name = part["engine"]
                if name not in bars:
                    bars[name] = progress.add_task(f"{verb} {name}", total=None)
                progress.update(bars[name], completed=part["done"], total=part["total"] or None)

        yield show
