"""Commands that use the admin API of a running kvpin."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from proxy.cli.client import (
    DEFAULT_URL,
    AdminClient,
    AdminKeyOption,
    JsonOption,
    UrlOption,
    fail,
    print_json,
    refuse_early_options,
)
from proxy.cli.examples import example
from proxy.cli.help import App
from proxy.cli.targets import PrefixOptions, RequestOptions, TargetOptions, with_target

engines_app = App(help="List, add, remove and drain engines.", rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("stats", epilog=example("stats"))(stats)
    app.add_typer(engines_app, name="engines", epilog=example("engines"))
    for command in (flush, offload, restore, warm, pin, route):
        app.command(command.__name__, epilog=example(command.__name__))(with_target(command))
    app.command("unpin", epilog=example("unpin"))(unpin)
    app.command("requests", epilog=example("requests"))(requests)


def stats(
    url: UrlOption = DEFAULT_URL, admin_key: AdminKeyOption = None, as_json: JsonOption = False
) -> None:
    """Show what each engine holds, and how exact predictions were."""
    answer = AdminClient(url, admin_key).get("/stats")
    _show(answer, as_json, "tables.show_stats")


def flush(
    *,
    target: TargetOptions,
    url: UrlOption = DEFAULT_URL,
    admin_key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete KV: of a prefix and everything after it, of an engine, of a tenant, or all."""
    _run(AdminClient(url, admin_key), "flush", target.body(), as_json)


def offload(
    *,
    target: TargetOptions,
    url: UrlOption = DEFAULT_URL,
    admin_key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move KV from the GPU tier to host memory."""
    _run(AdminClient(url, admin_key), "offload", target.body(), as_json)


def restore(
    *,
    target: TargetOptions,
    or_warm: Annotated[
        bool, typer.Option("--or-warm", help="Compute the prefix again on engines that cannot restore.")
    ] = False,
    url: UrlOption = DEFAULT_URL,
    admin_key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move KV from host memory to the GPU tier."""
    body = target.body() | ({"fallback": "warm"} if or_warm else {})
    _run(AdminClient(url, admin_key), "restore", body, as_json)


def warm(
    *,
    target: PrefixOptions,
    all_engines: Annotated[bool, typer.Option("--all-engines", help="On every engine of the model.")] = False,
    url: UrlOption = DEFAULT_URL,
    admin_key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute a prefix before it is needed."""
    body = target.body() | ({"engines": "all"} if all_engines else {})
    _run(AdminClient(url, admin_key), "warm", body, as_json)


def pin(
    *,
    target: PrefixOptions,
    ttl: Annotated[float, typer.Option(metavar="SECONDS", help="How long to protect it.")] = 3600.0,
    url: UrlOption = DEFAULT_URL,
    admin_key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Protect a prefix from eviction for some time."""
    _run(AdminClient(url, admin_key), "pin", target.body() | {"ttl_s": ttl}, as_json)


def unpin(
    pin_id: Annotated[str, typer.Argument(metavar="PIN", help="As `kvpin pin` printed it.")],
    url: UrlOption = DEFAULT_URL,
    admin_key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a pin."""
    _run(AdminClient(url, admin_key), "unpin", {"pin_id": pin_id}, as_json)


def route(
    *,
    target: RequestOptions,
    url: UrlOption = DEFAULT_URL,
    admin_key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show where a request would go now, and why; nothing is sent."""
    answer = AdminClient(url, admin_key).post("/route", target.request())
    _show(answer, as_json, "decisions.show_route")


def requests(
    request_id: Annotated[str | None, typer.Argument(metavar="ID", help="Explain this request.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="How many requests to list.")] = 20,
    url: UrlOption = DEFAULT_URL,
    admin_key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the last requests, newest first; with an id, explain its cache hit or miss."""
    client = AdminClient(url, admin_key)
    if request_id is not None:
        _show(client.get(f"/requests/{request_id}"), as_json, "decisions.show_request")
        return
    answer = client.get("/requests", limit=limit)
    _show(answer, as_json, "decisions.show_list")


@engines_app.callback(invoke_without_command=True)
def engines(
    context: typer.Context,
    url: UrlOption = DEFAULT_URL,
    admin_key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List engines; or add, remove, drain one."""
    refuse_early_options(context)
    if context.invoked_subcommand is None:
        engines_list(url, admin_key, as_json)


@engines_app.command("list", epilog=example("engines list"))
def engines_list(
    url: UrlOption = DEFAULT_URL, admin_key: AdminKeyOption = None, as_json: JsonOption = False
) -> None:
    """List engines, as `kvpin engines` alone does."""
    _show(AdminClient(url, admin_key).get("/engines"), as_json, "tables.show_engines", "engines")


@engines_app.command("add", epilog=example("engines add"))
def engines_add(
    description: Annotated[str, typer.Argument(metavar="KIND=URL[,name=value…]")],
    url: UrlOption = DEFAULT_URL,
    admin_key: AdminKeyOption = None,
) -> None:
    """Add an engine."""
    from proxy.settings import SettingsError, split_engine_flag  # noqa: PLC0415 - slow to import

    try:
        body = split_engine_flag(description, flag="")
    except SettingsError as error:
        fail(str(error).lstrip())
    engine = AdminClient(url, admin_key).post("/engines", body)
    typer.echo(f"added {engine['id']}")


@engines_app.command("remove", epilog=example("engines remove"))
def engines_remove(
    engine_id: Annotated[str, typer.Argument(metavar="ENGINE", help="As `kvpin engines` lists it.")],
    url: UrlOption = DEFAULT_URL,
    admin_key: AdminKeyOption = None,
) -> None:
    """Remove an engine."""
    AdminClient(url, admin_key).delete(f"/engines/{engine_id}")
    typer.echo(f"removed {engine_id}")


@engines_app.command("drain", epilog=example("engines drain"))
def engines_drain(
    engine_id: Annotated[str, typer.Argument(metavar="ENGINE", help="As `kvpin engines` lists it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it take requests again.")] = False,
    url: UrlOption = DEFAULT_URL,
    admin_key: AdminKeyOption = None,
) -> None:
    """Give an engine no new requests."""
    engine = AdminClient(url, admin_key).post(f"/engines/{engine_id}/drain", {"undo": undo})
    typer.echo(f"{engine_id} is {engine['state']}, {engine['in_flight']} requests in flight")


def _run(client: AdminClient, verb: str, body: dict[str, Any], as_json: bool) -> None:
    """Runs an operation and prints its result; status 1 if it failed."""
    from proxy.cli import tables  # noqa: PLC0415 - rich is slow to import

    with tables.progress_bar(verb) as show:
        operation = client.run(verb, body, show)
    if as_json:
        print_json(operation)
    else:
        tables.show_operation(operation)
    if operation["state"] != "done":
        fail(operation["error"] or f"the operation is {operation['state']}")


def _show(answer: Any, as_json: bool, view: str, part: str | None = None) -> None:  # noqa: ANN401 - JSON
    if as_json:
        print_json(answer)
        return
    module, _, name = view.partition(".")
    show = getattr(import_module(f"proxy.cli.{module}"), name)  # late: rich is slow to import
    show(answer[part] if part is not None else answer)
