"""Examines engines for `kvpin doctor` and `kvpin init`, and shows what was found."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.text import Text

from engine_adapter import EngineError, EngineSpec
from proxy.cli.answer_tables import forms_of
from proxy.cli.engine_check.examine import Examination, examine
from proxy.cli.grid import TerminalTable, console
from proxy.observe.logs import configure_logs
from proxy.settings import LogSettings, SettingsError, UndetectedSettings, parse_engine_flag

# Stands for the kind until it is detected.
_UNKNOWN = "engine"


class UnusableEngine(Exception):
    """An engine cannot be examined: why, in one sentence that names it."""


def show_examination(found: dict[str, Any]) -> None:
    """An examined engine, and what keeps kvpin from using it fully."""
    out = console()
    table = TerminalTable(("name", "text"), text="text")
    for name, text in _of_engine(found):
        if text:
            table.add(Text(name, "bold"), text)
    table.print(out, header=False)
    for number, finding in enumerate(found["findings"], 1):
        out.print(f"\n{number}. {finding['problem']}", markup=False)
        if finding["remedy"]:
            out.print(f"   → {finding['remedy']}", markup=False)
    none = "" if found["findings"] else "no findings"
    if told := "; but ".join(filter(None, (none, found["unseen"]))):
        out.print(f"\n{told}", markup=False)


def _of_engine(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and texts; empty where nothing is known."""
    yield "engine", f"{found['kind']} {found['version']}".rstrip() + ", detected" * found["detected"]
    if found["role"] != "both":
        yield "role", found["role"]
    if found["model"]:
        yield "model", found["model"] + "".join(f", LoRA {name}" for name in found["loras"])
    for at, (name, state) in enumerate(found["models"].items()):
        yield "" if at else "router", f"{name}: {state}"
    if not found["model"]:
        yield "", "each is an engine of its own: name one to examine it, as kind=URL,model=NAME"
        return
    yield "context", f"{found['max_model_len']} tokens" if found["max_model_len"] else ""
    yield "blocks", _blocks(found)
    yield "load", f"{found['running']} running, {found['waiting']} waiting"
    yield "can", ", ".join(found["can"])
    for at, (name, instead) in enumerate(found["cannot"].items()):
        yield "" if at else "cannot", f"{name}: {instead}"
    yield "tokens", found["tokenisation"]["detail"]
    yield "forms", forms_of(found["tokenisation"])
    yield "events", found["view"]["detail"]
    probe = found["probe"]
    if probe is not None and probe["error"] is None:
        reported = f"the engine reports {probe['reported']} of {probe['n_tokens']} tokens reused"
        yield "probe", f"sent twice: {reported}, kvpin predicted {probe['predicted']}"


def _blocks(found: dict[str, Any]) -> str:
    size = [f"{found['tokens_per_block']} tokens each"] if found["tokens_per_block"] else []
    counts = {tier: found[f"{tier}_blocks"] for tier in ("gpu", "host")}
    return ", ".join([*size, *(f"{count} on {tier}" for tier, count in counts.items() if count is not None)])


def examined(
    engines: Sequence[str], options: Mapping[str, str] = MappingProxyType({}), *, probe: bool = False
) -> list[Examination]:
    """Examines engines at the same time, each given as URL or KIND=URL[,name=value…]. A terminal shows that
    it waits for them.

    `options`: further ones of each, `kind` among them. `probe`: send two short requests to each. Raises
    UnusableEngine if one of them cannot be examined.
    """

    async def all_of_them() -> list[Examination]:
        return await asyncio.gather(*(_examine(each, dict(options), probe=probe) for each in engines))

    configure_logs(LogSettings(level="error"))
    addresses = ", ".join(each.partition(",")[0] for each in engines)
    with Console(stderr=True).status(f"asking {addresses} …"):
        return asyncio.run(all_of_them())


async def _examine(text: str, options: dict[str, str], *, probe: bool) -> Examination:
    address = ""
    try:
        spec, more = _engine_of(text, options)
        address = spec.url
        return await examine(spec, options=more, probe=probe, warn=_warn)
    except (SettingsError, EngineError) as error:
        message = str(error)
        raise UnusableEngine(message if address in message else f"{address}: {message}") from error


def _warn(text: str) -> None:
    Console(stderr=True).print(f"kvpin: {text}", markup=False, highlight=False, soft_wrap=True)


def _engine_of(text: str, options: dict[str, str]) -> tuple[EngineSpec, dict[str, str]]:
    """The description of an engine given as URL or KIND=URL[,name=value…], and the options of its kind. The
    kind is empty where kvpin detects it. Raises SettingsError."""
    if "://" not in text:
        raise SettingsError(f"{text!r} is not an address: it needs http:// or https://")
    kind = options.pop("kind", None)
    named = "://" not in text.partition("=")[0]
    if named and kind is not None:
        raise SettingsError(f"leave out --kind: {text!r} names the kind")
    settings = (
        parse_engine_flag(text if named else f"{kind}={text}", flag="", more=options)
        if named or kind is not None
        else parse_engine_flag(f"{_UNKNOWN}={text}", flag="", reads_as=UndetectedSettings, more=options)
    )
    spec = settings.spec()
    spec = replace(spec, id=spec.id or "engine", kind=spec.kind if named else kind or "")
    return spec, dict(settings.model_extra or {})
