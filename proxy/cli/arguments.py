"""Arguments of commands: those that name what to act on, and how `--help` shows them."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import typer
from typer.core import TyperArgument, TyperCommand

from proxy.cli.client import fail, flag_of, option, with_options

# --- options that name what to act on, and the body they make for the admin API -------------------------

# Fields that name a prompt or a prefix.
_PREFIXES = ("messages_file", "prompt", "prompt_file", "token_ids", "prompt_cache_key")


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of a command that takes a request, in the order of its help."""

    messages_file: str | None = option("FILE", "JSON: a list of messages, or a request body; - for stdin.")
    prompt: str | None = option("TEXT", "Text of a completion.")
    prompt_file: str | None = option("FILE", "Text of a completion, from a file; - for stdin.")
    token_ids: str | None = option("1,2,3", "Token ids; @FILE reads a JSON list.")
    tenant: str | None = option("NAME", "The tenant whose request it is.")
    model: str | None = option("NAME", "The model, where several are served.")
    cache_salt: str | None = option("SALT", "The cache_salt of the client's requests.")

    def body(self) -> dict[str, Any]:
        """The target as the admin API takes it."""
        self._check([flag_of(name) for name in _PREFIXES if self._given(name) is not None])
        named = ("prompt", "prompt_cache_key", "engine", "tenant", "model", "cache_salt")
        body = {name: value for name in named if (value := self._given(name)) is not None}
        if self.prompt_file is not None:
            body["prompt"] = _read(self.prompt_file)
        if self.token_ids is not None:
            body["token_ids"] = _token_ids(self.token_ids)
        if self.messages_file is not None:
            body = _chat(self.messages_file) | body
        return body

    def request(self) -> dict[str, Any]:
        """The target as a data-plane request, for a dry run."""
        body = self.body()
        if "token_ids" in body:
            body["prompt"] = body.pop("token_ids")
        return body

    def _given(self, name: str) -> Any:  # noqa: ANN401 - of any option
        """The value of an option; None for one that this command does not take."""
        return getattr(self, name, None)

    def _check(self, given: list[str]) -> None:
        """Exactly one prefix is named. `given`: the flags that name one."""
        if len(given) > 1:
            fail(f"{given[0]} and {given[1]} exclude each other: name one target")
        if not given:
            own = {each.name for each in fields(self)}
            flags = ", ".join(flag_of(name) for name in _PREFIXES if name in own)
            fail(f"this command needs a prefix: use one of {flags}")
        if self._given("prompt_cache_key") is not None and self.cache_salt is not None:
            fail("leave out --cache-salt: --prompt-cache-key uses the salt of that request")


@dataclass(frozen=True, slots=True)
class PrefixOptions(RequestOptions):
    """The options of a command that takes a prefix."""

    prompt_cache_key: str | None = option("KEY", "The last prompt with this prompt_cache_key.")
    engine: str | None = option("ID", "Only on this engine.")
    tenant: str | None = option("NAME", "The tenant whose prefix it is.")


@dataclass(frozen=True, slots=True)
class TargetOptions(PrefixOptions):
    """The options of a command that takes any target."""

    engine: str | None = option("ID", "Everything on this engine; with a prefix, only there.")
    tenant: str | None = option("NAME", "Everything of this tenant; with a prefix, its owner.")
    everything: bool = option(None, "Everything on all engines.", False, "--all")

    def body(self) -> dict[str, Any]:
        """The target as the admin API takes it."""
        return super(TargetOptions, self).body() | ({"all": True} if self.everything else {})

    def _check(self, given: list[str]) -> None:
        """Exactly one target is named."""
        given += ["--all"] * self.everything
        if self.everything and (self.engine is not None or self.tenant is not None):
            fail("--all means every engine and every tenant: leave out --engine and --tenant")
        if not given and self.engine is None and self.tenant is None:
            fail(f"name a target: use one of {', '.join(map(flag_of, _PREFIXES))}, --engine, --tenant, --all")
        if given:
            super(TargetOptions, self)._check(given)


def _chat(name: str) -> dict[str, Any]:
    """Messages, or the fields of a whole request that belong to its prompt."""
    value = _json(_read(name), "--messages-file")
    if isinstance(value, list):
        return {"messages": value}
    if not isinstance(value, dict) or "messages" not in value:
        fail("--messages-file must hold a JSON list of messages, or an object with messages")
    kept = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "model", "cache_salt")
    return {key: value[key] for key in kept if value.get(key) is not None}


def _token_ids(text: str) -> list[int]:
    if text.startswith("@"):
        values = _json(_read(text[1:]), "--token-ids")
        if not isinstance(values, list):
            fail("--token-ids: the file must hold a JSON list")
        return values
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        fail(f"--token-ids {text!r}: write integers with commas between them")


def _json(text: str, option: str) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        fail(f"{option} is not JSON: {error}")


def _read(name: str) -> str:
    """The text with its line ends as they are."""
    try:
        return (sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()).decode()
    except OSError as error:
        fail(f"{name!r} cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        fail(f"{name!r} is not UTF-8 text")


# --- shows arguments in `--help` by the words that stand for them, as in `kvpin bench URL...` -----------
# Typer alone adds braces and Python's types: `{URL}...`, `URL <list[str]>`. Every option has a metavar of its
# own.

EXAMPLES = {
    **{
        words: f"kvpin {words}"
        for words in (
            "stats",
            "usage",
            "engines",
            "engines list",
            "tables",
            "tables list",
            "keys",
            "keys list",
            "top",
        )
    },
    "serve": "kvpin serve --reuse --engine vllm=http://gpu-1:8000 --engine vllm=http://gpu-2:8000",
    "warm": "kvpin warm --messages-file chat.json --all-engines",
    "offload": "kvpin offload --messages-file chat.json",
    "restore": "kvpin restore --messages-file chat.json --or-warm",
    "pin": "kvpin pin --messages-file chat.json --ttl 600",
    "unpin": "kvpin unpin pin-1",
    "flush": "kvpin flush --messages-file chat.json",
    "route": "kvpin route --messages-file chat.json",
    "requests": "kvpin requests --limit 5",
    "engines add": "kvpin engines add vllm=http://gpu-3:8000,id=third",
    "engines drain": "kvpin engines drain third",
    "engines remove": "kvpin engines remove third",
    "tables put": "kvpin tables put table.safetensors --id support",
    "tables show": "kvpin tables show support",
    "tables delete": "kvpin tables delete support",
    "keys add": "kvpin keys add --tenant acme --model qwen3 --expires 2027-01-31T00:00:00Z",
    "keys remove": "kvpin keys remove key-9f86d081884c",
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
