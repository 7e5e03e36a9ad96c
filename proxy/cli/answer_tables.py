"""Answers of the admin API as tables for people."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn

from proxy.cli.grid import Columns, TerminalTable, bars, console, of_state


def _beside_state(engine: dict[str, Any]) -> str:
    """Its role if it has one, and the state of its model where the engine loads and unloads it."""
    role, model = engine.get("role", "both"), engine.get("model_state")  # older kvpins tell none
    return (f", {role}" if role != "both" else "") + (f", model {model}" if model is not None else "")


_ENGINES: Columns = {
    "engine": "id",
    "kind": "kind",
    "address": "url",
    "state": lambda engine: of_state(engine["state"], _beside_state(engine)),
    "model": "model",
    "view": lambda engine: of_state(engine["trust"]),
    "in flight": "in_flight",
    "served": lambda engine: _ended(engine, ""),
    "last error": lambda engine: " ".join((engine["last_error"] or "").split()),
}
_POOL: Columns = {
    "engine": "id",
    "state": lambda engine: of_state(engine["state"], _beside_state(engine)),
    "view": lambda engine: of_state(engine["trust"], f" ({engine['why']})"),
    "gpu": lambda engine: engine["blocks"]["gpu"],
    "host": lambda engine: engine["blocks"]["host"],
    "disk": lambda engine: engine["blocks"]["disk"],
    "in flight": "in_flight",
    "served": lambda engine: _ended(engine, ""),
    "exact": lambda engine: f"{engine['audit']['exact']} of {engine['audit']['checked']}",
    "cached": lambda engine: f"{engine['audit']['cached_tokens']} tokens",
}
_PINS: Columns = {
    "pin": "pin_id",
    "target": "target",
    "engines": lambda pin: ", ".join(pin["engines"]),
    "blocks": "blocks",
    "ends in": lambda pin: f"{pin['expires_in_s']:.0f} s",
    "at": lambda pin: pin.get("kvpin") or "",
}
_PROMPT_TABLES: Columns = {
    "table": "table_id",
    "rows": "rows",
    "hidden": "hidden",
    "bytes": "bytes",
    "extra id": "extra_id",
}
_KEYS: Columns = {
    "id": "id",
    "name": "name",
    "tenant": "tenant",
    "key": lambda key: f"…{key['ending']}",
    "models": lambda key: "all" if key["models"] is None else ", ".join(key["models"]),
    "expires": lambda key: of_state("expired") if key["expired"] else _day(key["expires"]),
    "created": lambda key: _day(key["created"]),
}
_PEERS: Columns = {
    "peer": "name",
    "engines shared": "engines",
    "in flight": "in_flight",
    "in step": lambda peer: "yes" if peer["in_step"] else "no",
    "heard": lambda peer: f"{peer['silent_s']:.1f} s ago",
    "missed": "missed",
}
_SLOTS: Columns = {
    "slot": "id",
    "tokens": "tokens",
    "unknown": "unknown",
    "in a file": "saved",
    "runs": "operation",
    "pinned for": lambda slot: f"{slot['pinned_s']:.0f} s" if slot["pinned_s"] else "",
}
_PARTS: Columns = {
    "engine": "engine",
    "verb": "verb",
    "state": lambda part: of_state(part["state"]),
    "blocks": lambda part: f"{part['done']} of {part['total']}",
    "bytes": "bytes",
    "left": lambda part: ", ".join(f"{count} {reason}" for reason, count in part["left"].items() if count),
    "error": "error",
}


_USE: Columns = {
    "day": "day",
    "tenant": lambda row: row["tenant"] or "–",
    "model": lambda row: row["model"] or "–",
    "requests": "requests",
    "failed": "failed",
    "prompt tokens": "prompt_tokens",
    "cached": "cached_tokens",
    "answer tokens": "output_tokens",
}


def show_usage(answer: dict[str, Any]) -> None:
    """Prints one row per day, tenant and model."""
    numbers = ("requests", "failed", "prompt tokens", "cached", "answer tokens")
    TerminalTable.of(answer["usage"], _USE, less=("failed",), numbers=numbers).print(console())


def show_engines(answer: dict[str, Any]) -> None:
    """Prints one row per engine, and a line for each that an operator has removed."""
    less, out = ("served", "kind", "view", "in flight", "model"), console()
    TerminalTable.of(answer["engines"], _ENGINES, text="last error", less=less).print(out)
    for each in answer.get("removed", ()):  # engines that are not connected come without it
        unnamed = "nothing names it any more, so an undo needs its settings"
        why = "settings name it" if each["named"] else unnamed
        line = f"removed {_day(each['removed'])} UTC: {each['engine']}; {why}; undo: {each['undo']}"
        out.print(line, markup=False, style="dim", soft_wrap=True)


def show_keys(answer: dict[str, Any]) -> None:
    """Prints one row per key; without keys, what that means for requests."""
    if not answer["keys"]:
        console().print(without_issued_keys(answer))
        return
    TerminalTable.of(answer["keys"], _KEYS, text="models", less=("created", "name")).print(console())


def without_issued_keys(answer: dict[str, Any]) -> str:
    """What holds for requests while there is no issued key, by the answer that lists none."""
    if not answer["needed"]:
        return "no key was issued, and requests need none; `kvpin keys add` issues the first one"
    if answer["in_settings"]:
        return f"no issued key; keys in the settings: {answer['in_settings']}"
    return "no key is left: kvpin refuses every request; `kvpin keys add` issues a key"


def _day(moment: str | None) -> str:
    """A time to the minute, in UTC."""
    return moment[:16].replace("T", " ") if moment is not None else "never"


def show_stats(stats: dict[str, Any]) -> None:
    """Pools, engines, pins, totals."""
    out, exchange, totals = console(), stats["exchange"], stats["totals"]
    for pool in stats["pools"]:
        _show_pool(out, pool, is_shared=exchange is not None)
    _show_unconnected(out, stats)
    if stats["pins"]:
        TerminalTable.of(stats["pins"], _PINS, text="engines").print(out)
    if exchange is not None and not exchange["connected"]:
        out.print("the exchange is gone: this kvpin goes on alone")
    if exchange is not None and exchange["peers"]:
        TerminalTable.of(exchange["peers"], _PEERS).print(out)
    out.print(
        f"{ready_engines(totals['ready'], totals['engines'], totals['elsewhere'])}, "
        f"{totals['in_flight']} requests in flight, {_ended(totals)}; "
        f"reuse is {'on' if stats['reuse'] else 'off'}"
    )


def _ended(counts: dict[str, Any], served: str = " served") -> str:
    """The requests that are over: those that were served, and if there are any, those whose prompt an engine
    computed for another one, and those whose answer was an error, of the client's too."""
    prefilled = f", {counts['prefilled']} for others" if counts.get("prefilled") else ""
    failed = counts["failed"]
    errors = f", {failed} error{'s' * (failed > 1)}" if failed else ""
    return f"{counts['served']}{served}{prefilled}{errors}"


def ready_engines(ready: int, of: int, elsewhere: int) -> str:
    """The number of ready engines, and of those that another kvpin uses for this one."""
    more = f" and {elsewhere} used through another kvpin" if elsewhere else ""
    return f"{ready} of {of} engines ready{more}"


def forms_of(tokenisation: dict[str, Any]) -> str:
    """Who makes the tokens of each form of prompt."""
    forms = tokenisation["forms"].items()
    who = {"local": "made here", "engine": "made by the engine", "none": "not followed"}
    lists = {source: [form for form, row in forms if row["source"] == source] for source in who}
    return "; ".join(f"{who[source]}: {', '.join(names)}" for source, names in lists.items() if names)


def checked_of(audit: dict[str, Any]) -> str:
    """How many predictions were exact, and why others were not checked."""
    reasons = sorted(audit["unchecked"].items(), key=lambda each: -each[1])
    why = ", ".join(f"{reason}: {count}" for reason, count in reasons)
    return (
        f"exact {audit['exact']} of {audit['checked']} checked; "
        f"{sum(audit['unchecked'].values())} not checked ({why})"
    )


def _show_pool(out: Console, pool: dict[str, Any], *, is_shared: bool) -> None:
    """The engines of a pool. `is_shared`: there are other kvpins, which may own some of them."""
    title = f"{pool['model']}: {pool['index_entries']} blocks of {pool['tokens_per_block']} tokens"
    less = ("disk", "host", "served", "cached", "exact")
    TerminalTable.of(pool["engines"], _POOL, text="view", less=less, title=title).print(out)
    if pool["tokenisation"] is not None:
        out.print(pool["tokenisation"]["detail"], markup=False)
        out.print(forms_of(pool["tokenisation"]), markup=False)
    for engine in pool["engines"]:
        if engine["audit"]["unchecked"]:
            out.print(f"{engine['id']}: {checked_of(engine['audit'])}", markup=False)
        _show_slots(out, engine)
        if is_shared and engine["owner"] is not None:
            out.print(f"{engine['id']}: used only by this kvpin, {engine['owner']}", markup=False)


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
        show_engines({"engines": lost})


def show_prompt_tables(answer: dict[str, Any]) -> None:
    """Prints one row per prompt table."""
    layout = {"less": ("extra id",), "numbers": ("rows", "hidden", "bytes")}
    TerminalTable.of(answer["prompt_tables"], _PROMPT_TABLES, **layout).print(console())


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


def _show_slots(out: Console, engine: dict[str, Any]) -> None:
    """The slots and files of an engine that has some, and its findings."""
    kv = engine["kv"]
    if kv.get("slots"):
        TerminalTable.of(kv["slots"], _SLOTS, title=f"slots of {engine['id']}").print(out)
    for tier, held in kv.get("files", {}).get("tiers", {}).items():
        out.print(
            f"{engine['id']}: {held['entries']} files on {tier}, "
            f"{held['bytes'] / 2**20:.0f} of {held['cap'] / 2**20:.0f} MiB, in {held['place']}"
            f"{' (memory: a reboot loses them)' if held['in_memory'] else ''}",
            markup=False,
        )
    for finding in engine.get("findings", []):
        out.print(f"{engine['id']}: {finding}", markup=False)


def show_operation(operation: dict[str, Any]) -> None:
    """Prints what an operation did, by engine."""
    out = console()
    if operation["engines"]:
        TerminalTable.of(operation["engines"], _PARTS, text="error", less=("verb", "bytes")).print(out)
    for name, value in operation["result"].items():
        out.print(f"{name}: {value}", markup=False)
    if operation["note"]:
        out.print(operation["note"], markup=False)


@contextmanager
def progress_bar(verb: str) -> Iterator[Any]:
    """A progress bar on standard error; nothing where that is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("blocks"))
    with bars(*columns) as progress:
        tasks = dict[str, TaskID]()

        def show(operation: dict[str, Any]) -> None:
            for part in operation["engines"]:
                name = part["engine"]
                if name not in tasks:
                    tasks[name] = progress.add_task(f"{verb} {name}", total=None)
                progress.update(tasks[name], completed=part["done"], total=part["total"] or None)

        yield show
