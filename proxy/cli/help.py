"""Shows arguments in `--help` by the words that stand for them, as in `kvpin bench URL...`.

Typer alone adds braces and Python's types: `{URL}...`, `URL <list[str]>`. Every option has a metavar of its
own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperArgument, TyperCommand

from proxy.cli.client import fail
from proxy.cli.options import with_options

EXAMPLES = {
    "serve": "kvpin serve --reuse --engine vllm=http://gpu-1:8000 --engine vllm=http://gpu-2:8000",
    "stats": "kvpin stats",
    "warm": "kvpin warm --messages-file chat.json --all-engines",
    "offload": "kvpin offload --messages-file chat.json",
    "restore": "kvpin restore --messages-file chat.json --or-warm",
    "pin": "kvpin pin --messages-file chat.json --ttl 600",
    "unpin": "kvpin unpin pin-1",
    "flush": "kvpin flush --messages-file chat.json",
    "route": "kvpin route --messages-file chat.json",
    "requests": "kvpin requests --limit 5",
    "usage": "kvpin usage",
    "engines": "kvpin engines",
    "engines list": "kvpin engines list",
    "engines add": "kvpin engines add vllm=http://gpu-3:8000,id=third",
    "engines drain": "kvpin engines drain third",
    "engines remove": "kvpin engines remove third",
    "tables": "kvpin tables",
    "tables put": "kvpin tables put table.safetensors --id support",
    "tables list": "kvpin tables list",
    "tables show": "kvpin tables show support",
    "tables delete": "kvpin tables delete support",
    "keys": "kvpin keys",
    "keys add": "kvpin keys add --tenant acme --model qwen3 --expires 2027-01-31T00:00:00Z",
    "keys list": "kvpin keys list",
    "keys remove": "kvpin keys remove key-9f86d081884c",
    "top": "kvpin top",
    "bench": "kvpin bench http://127.0.0.1:8000 --num-prompts 4 --prefix-len 100",
    "doctor": "kvpin doctor http://gpu-1:8000 --probe",
    "init": "kvpin init http://gpu-1:8000",
    "config": "kvpin config check --config kvpin.toml",
    "config check": "kvpin config check --config kvpin.toml",
    "advise": "kvpin advise traffic.jsonl",
    "replay": "kvpin replay traffic.jsonl --engines 1,2",
}
"""By the words of the command. A test runs them in this order."""


_Function = TypeVar("_Function", bound=Callable[..., Any])


class Command(TyperCommand):
    """A command with this help."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ANN401 - typer does not export the type
        """The words of the usage line."""
        return [re.sub(r"^\{(.*)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - likewise
        """Writes arguments and options."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for each in self.get_params(ctx):
            if (record := each.get_help_record(ctx)) is None:
                continue
            if isinstance(each, TyperArgument):
                sections["Arguments"].append((each.display_name_raw, record[1]))
            else:
                sections["Options"].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class App(typer.Typer):
    """Commands with this help, and with the example of each below it. Their options may be dataclasses."""

    def __init__(self, text: str, group: str = "", **settings: Any) -> None:  # noqa: ANN401 - as typer has it
        """`group`: the word of the command line that these commands stand behind."""
        super().__init__(
            name=group or None, help=text, epilog=_example(group), rich_markup_mode=None, **settings
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[_Function], _Function]:  # noqa: ANN401 - as typer has it
        """Adds a command."""

        def add(function: _Function) -> _Function:
            word = name or function.__name__.replace("_", "-")
            words = f"{self.info.name} {word}" if self.info.name else word
            register = super(App, self).command(word, cls=Command, epilog=_example(words), **settings)
            register(with_options(function))
            return function

        return add

    def list_command(self, function: Callable[..., None]) -> Callable[..., None]:
        """Adds a command `list`, which the group alone runs, too. Refuses options between the group and its
        command, as in `kvpin engines --url X drain`: the command would not see them, and act on another
        kvpin."""
        self.command("list")(function)
        listing = with_options(function)

        def alone(context: typer.Context, **given: Any) -> None:  # noqa: ANN401 - typer passes what it parsed
            following = context.invoked_subcommand
            if following is None:
                listing(**given)
                return
            for each in context.command.params:
                source = context.get_parameter_source(each.name or "")
                if source is not None and source.name == "COMMANDLINE":
                    fail(f"write {each.opts[0]} after {following}")

        own = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        parameters = [own, *inspect.signature(listing).parameters.values()]
        alone.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        alone.__annotations__ = {each.name: each.annotation for each in parameters}
        self.callback(invoke_without_command=True)(alone)
        return function


def _example(words: str) -> str | None:
    """The text below the options of a command's help. Its first line keeps click from folding it."""
    return f"\b\nExample:\n  {EXAMPLES[words]}" if words in EXAMPLES else None
