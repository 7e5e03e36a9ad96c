"""Commands that use the admin API of a running kvpin."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from proxy.cli.arguments import App, PrefixOptions, RequestOptions, TargetOptions
from proxy.cli.client import AdminClient, JsonOption, fail, option, path_part, print_json, show

EngineId = Annotated[str, typer.Argument(metavar="ENGINE", help="As `kvpin engines` lists it.")]
# How often an engine that drains is asked for its requests.
_POLL_S = 0.5
engines_app = App("List, add, remove and drain engines.", "engines")


def stats(*, kvpin: AdminClient, as_json: JsonOption = False) -> None:
    """Show what each engine holds, and how exact predictions were."""
    show(kvpin.get("/stats"), "answer_tables.show_stats", as_json=as_json)


def flush(*, target: TargetOptions, kvpin: AdminClient, as_json: JsonOption = False) -> None:
    """Delete KV of a prefix, of an engine, of a tenant, or all.

    A prefix goes with everything after it.
    """
    _run(kvpin, "flush", target.body(), as_json=as_json)


def offload(*, target: TargetOptions, kvpin: AdminClient, as_json: JsonOption = False) -> None:
    """Move KV from the GPU tier to host memory."""
    _run(kvpin, "offload", target.body(), as_json=as_json)


def restore(
    *,
    target: TargetOptions,
    or_warm: Annotated[
        bool, typer.Option("--or-warm", help="Compute the prefix again on engines that cannot restore.")
    ] = False,
    kvpin: AdminClient,
    as_json: JsonOption = False,
) -> None:
    """Move KV from host memory to the GPU tier."""
    _run(kvpin, "restore", target.body() | ({"fallback": "warm"} if or_warm else {}), as_json=as_json)


def warm(
    *,
    target: PrefixOptions,
    all_engines: Annotated[bool, typer.Option("--all-engines", help="On every engine of the model.")] = False,
    kvpin: AdminClient,
    as_json: JsonOption = False,
) -> None:
    """Compute a prefix before it is needed."""
    _run(kvpin, "warm", target.body() | ({"engines": "all"} if all_engines else {}), as_json=as_json)


def pin(
    *,
    target: PrefixOptions,
    ttl: Annotated[float, typer.Option(metavar="SECONDS", help="How long, 7 days at most.")] = 3600.0,
    kvpin: AdminClient,
    as_json: JsonOption = False,
) -> None:
    """Protect a prefix from eviction for some time."""
    _run(kvpin, "pin", target.body() | {"ttl_s": ttl}, as_json=as_json)


def unpin(
    *,
    pin_id: Annotated[str, typer.Argument(metavar="PIN", help="As `kvpin pin` printed it.")],
    kvpin: AdminClient,
    as_json: JsonOption = False,
) -> None:
    """End a pin."""
    _run(kvpin, "unpin", {"pin_id": pin_id}, as_json=as_json)


def route(*, target: RequestOptions, kvpin: AdminClient, as_json: JsonOption = False) -> None:
    """Show where a request would go now, and why; nothing is sent."""
    body = target.request()
    show(kvpin.post("/route", body), "decisions.show_route", as_json=as_json)
    if not as_json and "messages" in body:
        typer.echo("a chat is counted with the opening of its answer; flush, pin and others leave that out")


def requests(
    *,
    request_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="Explain this request: its id, or how that begins.")
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="How many requests to list.")] = 20,
    kvpin: AdminClient,
    as_json: JsonOption = False,
) -> None:
    """List the last requests, or explain one.

    The newest come first. With an id: why its prompt was in the cache, or was not.
    """
    if request_id is not None:
        show(kvpin.get(f"/requests/{path_part(request_id)}"), "decisions.show_request", as_json=as_json)
    else:
        show(kvpin.get("/requests", limit=limit), "decisions.show_list", as_json=as_json)


def usage(
    *,
    days: Annotated[int, typer.Option(metavar="N", help="How many days to list.")] = 30,
    kvpin: AdminClient,
    as_json: JsonOption = False,
) -> None:
    """Show what each tenant used of each model, by day.

    Days are those of UTC, the newest first.
    """
    show(kvpin.get("/usage", days=days), "answer_tables.show_usage", as_json=as_json)


@engines_app.list_command
def engines(*, kvpin: AdminClient, as_json: JsonOption = False) -> None:
    """List engines, as `kvpin engines` alone does."""
    show(kvpin.get("/engines"), "answer_tables.show_engines", as_json=as_json)


@engines_app.command("add")
def engines_add(
    *, description: Annotated[str, typer.Argument(metavar="KIND=URL[,name=value…]")], kvpin: AdminClient
) -> None:
    """Add an engine."""
    from proxy.settings import SettingsError, split_engine_flag  # noqa: PLC0415 - slow to import

    try:
        body = split_engine_flag(description, flag="")
    except SettingsError as error:
        fail(str(error).lstrip())
    added = kvpin.post("/engines", body)
    typer.echo(
        f"added {added['id']}, not connected yet: `kvpin engines` says when it is ready, or why it is not"
    )
    _warn(added)


@engines_app.command("remove")
def engines_remove(*, engine_id: EngineId, kvpin: AdminClient) -> None:
    """Remove an engine."""
    removed = kvpin.delete(f"/engines/{path_part(engine_id)}")
    typer.echo(f"removed {engine_id}")
    _warn(removed or {})  # older kvpins answer nothing


@engines_app.command("drain")
def engines_drain(
    *,
    engine_id: EngineId,
    undo: Annotated[bool, typer.Option("--undo", help="Let it take requests again.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until its last request is over.")] = False,
    kvpin: AdminClient,
) -> None:
    """Give an engine no new requests, from any kvpin of the group.

    With a state_dir or Redis, it stays drained over a restart of kvpin. An engine that kvpin starts itself
    is known by its id and its machine's name.
    """
    if undo and wait:
        fail("--wait waits for an engine that drains: leave out --undo or --wait")
    engine = kvpin.post(f"/engines/{path_part(engine_id)}/drain", {"undo": undo})
    if undo and engine["state"] == "suspect":
        state = "takes requests again after a health check"
    else:
        state = f"is {engine['state']}"
    typer.echo(f"{engine_id} {state}, {engine['in_flight']} requests in flight")
    _warn(engine)
    if not (undo or wait):
        typer.echo("add --wait to wait for its last request, --undo to let it take requests again")
    if wait:
        began = time.monotonic()
        if engine["in_flight"]:
            _wait_until_idle(kvpin, engine_id)
        typer.echo(f"{engine_id} is drained, after {time.monotonic() - began:.1f} s: no request is in flight")


def _warn(answer: Mapping[str, Any]) -> None:
    """Prints the warning of an answer, if there is one; older kvpins have none."""
    if answer.get("warning"):
        typer.echo(f"warning: {answer['warning']}", err=True)


def _wait_until_idle(kvpin: AdminClient, engine_id: str) -> None:
    """Returns when no kvpin has a request on the engine, or when it is gone."""
    while any(each["id"] == engine_id and each["in_flight"] for each in kvpin.get("/engines")["engines"]):
        time.sleep(_POLL_S)


def _run(kvpin: AdminClient, verb: str, body: dict[str, Any], *, as_json: bool) -> None:
    """Runs an operation and prints its result; status 1 if it failed."""
    from proxy.cli import answer_tables  # noqa: PLC0415 - rich is slow to import

    with answer_tables.progress_bar(verb) as show_progress:
        operation = kvpin.run(verb, body, show_progress)
    if as_json:
        print_json(operation)
    else:
        answer_tables.show_operation(operation)
    if operation["state"] != "done":
        fail(operation["error"] or f"the operation is {operation['state']}")


tables_app = App("List, show, put and delete prompt tables.", "tables")
_PATH = "/prompt_tables"
TableId = Annotated[str, typer.Argument(metavar="ID", help="As `kvpin tables` lists it.")]


@tables_app.list_command
def list_tables(*, kvpin: AdminClient, as_json: JsonOption = False) -> None:
    """List the registered tables."""
    show(kvpin.get(_PATH), "answer_tables.show_prompt_tables", as_json=as_json)


@tables_app.command("show")
def show_table(*, table_id: TableId, kvpin: AdminClient, as_json: JsonOption = False) -> None:
    """Show a table, and how a request names it."""
    registered = kvpin.get(_PATH)["prompt_tables"]
    table = next((each for each in registered if each["table_id"] == table_id), None)
    if table is None:
        fail(f"there is no prompt table {table_id!r}")
    show(table, "answer_tables.show_prompt_table", as_json=as_json)


@tables_app.command("put")
def put(
    *,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="safetensors with one float tensor of rows × hidden size.")
    ],
    table_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="What requests name [from its content].")
    ] = None,
    extra_id: Annotated[
        int | None,
        typer.Option(metavar="N", help="The identity of its KV, 1 to 2**64-1 [from its content]."),
    ] = None,
    kvpin: AdminClient,
    as_json: JsonOption = False,
) -> None:
    """Register a table with kvpin, and with engines.

    Every engine that holds tables gets it, or none does.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        fail(f"{str(file)!r} cannot be read: {error.strerror}")
    given = {"id": table_id, "extra_id": extra_id}
    query = {name: value for name, value in given.items() if value is not None}
    table = kvpin.upload(_PATH, content, **query)
    if as_json:
        print_json(table)
    else:
        typer.echo(f"registered {table['table_id']}: {table['rows']} rows of {table['hidden']} values")


@tables_app.command("delete")
def delete(*, table_id: TableId, kvpin: AdminClient) -> None:
    """Delete a table here and on the engines."""
    kvpin.delete(f"{_PATH}/{path_part(table_id)}")
    typer.echo(f"deleted {table_id}")


keys_app = App("Issue, list and remove keys of clients.", "keys")


@keys_app.list_command
def list_keys(*, kvpin: AdminClient, as_json: JsonOption = False) -> None:
    """List the issued keys, without the keys themselves.

    Keys of the settings are not among them.
    """
    show(kvpin.get("/keys"), "answer_tables.show_keys", as_json=as_json)


@dataclass(frozen=True, slots=True)
class KeyOptions:
    """The options of a new key."""

    tenant: str | None = option("NAME", "A known tenant; if the settings name none, any [default].")
    new_tenant: bool = option(None, "The tenant may be a new one.", False, "--new-tenant")
    model: list[str] | None = option("NAME", "A model that the key is for; may be given again [all models].")
    expires: str | None = option("TIME", "When it ends, as 2027-01-31T00:00:00Z [never].")
    name: str = option("TEXT", "What the list shows beside it.", "")
    requests_per_minute: int | None = option("N", "Limit of its tenant, which the settings do not name.")
    tokens_per_minute: int | None = option("N", "Likewise.")
    concurrent_requests: int | None = option("N", "Likewise.")


@keys_app.command("add")
def keys_add(*, key: KeyOptions, kvpin: AdminClient, as_json: JsonOption = False) -> None:
    """Issue a key and print it, once.

    Once a key was issued, kvpin serves no request without one.
    """
    body = asdict(key)
    body["models"] = body.pop("model") or None
    added = kvpin.post("/keys", body)
    if as_json:
        print_json(added)
        return
    typer.echo(added["key"])
    typer.echo(
        f"issued {added['id']} for tenant {added['tenant']}: keep the key, kvpin does not show it again",
        err=True,
    )
    for note in added["notes"]:
        typer.echo(f"note: {note}", err=True)


@keys_app.command("remove")
def keys_remove(
    *,
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `kvpin keys` lists it.")],
    kvpin: AdminClient,
) -> None:
    """Remove an issued key."""
    removed = kvpin.delete(f"/keys/{path_part(key_id)}")
    typer.echo(f"removed {key_id}")
    _warn(removed)
    if not (left := kvpin.get("/keys"))["keys"]:
        from proxy.cli import answer_tables  # noqa: PLC0415 - rich is slow to import

        typer.echo(f"note: {answer_tables.without_issued_keys(left)}", err=True)
