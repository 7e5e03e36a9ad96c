"""Options that name what to act on, and the body they make for the admin API."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from proxy.cli.client import fail
from proxy.cli.options import option

# Flags that name a prompt or a prefix → their fields.
_PREFIXES = {
    "--messages-file": "messages_file",
    "--prompt": "prompt",
    "--prompt-file": "prompt_file",
    "--token-ids": "token_ids",
    "--prompt-cache-key": "prompt_cache_key",
}


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
        self._check([flag for flag in self._prefixes() if self._given(_PREFIXES[flag]) is not None])
        named = ("prompt", "prompt_cache_key", "engine", "tenant", "model", "cache_salt")
        body = {name: self._given(name) for name in named}
        if self.prompt_file is not None:
            body["prompt"] = _read(self.prompt_file)
        if self.token_ids is not None:
            body["token_ids"] = _token_ids(self.token_ids)
        if self.messages_file is not None:
            body |= _chat(self.messages_file)
        return {name: value for name, value in body.items() if value is not None}

    def request(self) -> dict[str, Any]:
        """The target as a data-plane request, for a dry run."""
        body = self.body()
        if "token_ids" in body:
            body["prompt"] = body.pop("token_ids")
        return body

    def _given(self, name: str) -> Any:  # noqa: ANN401 - of any option
        """The value of an option; None for one that this command does not take."""
        return getattr(self, name, None)

    def _prefixes(self) -> list[str]:
        """The flags that name a prompt or a prefix."""
        return [flag for flag, name in _PREFIXES.items() if name in {each.name for each in fields(self)}]

    def _check(self, given: list[str]) -> None:
        """Exactly one prefix is named. `given`: the flags that name one."""
        if len(given) > 1:
            fail(f"{given[0]} and {given[1]} exclude each other: name one target")
        if not given:
            fail(f"this command needs a prefix: use one of {', '.join(self._prefixes())}")
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
            fail(f"name a target: use one of {', '.join(_PREFIXES)}, --engine, --tenant, --all")
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
    return {key: value[key] for key in kept if key in value}


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
        return json.loads(text)
    except ValueError as error:
        fail(f"{option} is not JSON: {error}")


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        fail(f"{name!r} cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        fail(f"{name!r} is not UTF-8 text")
