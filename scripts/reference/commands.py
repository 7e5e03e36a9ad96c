"""The page of all commands."""

from __future__ import annotations

from collections.abc import Iterator

import typer
from click import Command, Context

from engine_adapter.torch_engine.serve import app as engine_app
from proxy.cli.main import app

_WIDTH = 100


def cli_page() -> str:
    """The help of every command."""
    parts = [
        "# Commands",
        "",
        "`scripts/docs` writes this page: the text that each command shows with `--help`.",
    ]
    for words, command in _commands("kvpin", typer.main.get_command(app)):
        parts += ["", f"## {words}", "", "```", _help(words, command), "```"]
    return "\n".join(parts) + "\n"


def _commands(words: str, command: Command) -> Iterator[tuple[str, Command]]:
    """A command and those below it."""
    yield words, command
    for name, each in getattr(command, "commands", {}).items():
        if words == "kvpin" and name == "engine":
            yield "kvpin engine", typer.main.get_command(engine_app)
        else:
            yield from _commands(f"{words} {name}", each)


def _help(words: str, command: Command) -> str:
    context = Context(command, info_name=words, terminal_width=_WIDTH, max_content_width=_WIDTH)
    return "\n".join(line.rstrip() for line in command.get_help(context).splitlines()).strip()
