"""`kvpin tables`: the prompt tables (p-tuning) of a running kvpin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from proxy.cli.client import AdminClient, JsonOption, fail, path_part, print_json, show
from proxy.cli.help import App

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
