"""`kvpin doctor`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from proxy.cli.client import show
from proxy.cli.options import option

if TYPE_CHECKING:
    from engine_adapter import EngineSpec
    from proxy.doctor.doctor import Examination

_FINDINGS, _UNUSABLE = 1, 2
# Stands for the kind until it is detected.
_UNKNOWN = "engine"


class UnusableEngine(Exception):
    """An engine cannot be examined: why, in one sentence that names it."""


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """Options of the engine that `kvpin doctor` examines."""

    kind: str | None = option("KIND", "Its framework [detected].")
    api_key: str | None = option("KEY", "The engine's key, if it needs one.")
    events: str | None = option("ADDRESS", "Address of its KV events [the engine's own].")
    tokenizer: str | None = option("DIR_OR_ID", "Its model's tokenizer [the engine's own].")


def doctor(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="The engine's address; or KIND=URL[,name=value…], as serve's --engine takes it.",
        ),
    ],
    *,
    options: DoctorOptions,
    probe: Annotated[bool, typer.Option("--probe", help="Send two short requests and compare.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the examination as JSON.")] = False,
) -> None:
    """Examine an engine: what it is, what kvpin can do with it.

    Findings name the flag that would let kvpin do more.
    Exit status 0: no findings; 1: findings; 2: the engine cannot be examined.
    """
    given = {name: value for name, value in asdict(options).items() if value is not None}
    try:
        (examination,) = examined([engine], given, probe=probe)
    except UnusableEngine as error:
        typer.echo(f"kvpin: {error}", err=True)
        raise typer.Exit(_UNUSABLE) from None
    found = examination.as_json()
    show(found, "examination.show_examination", as_json=as_json)
    if found["findings"]:
        raise typer.Exit(_FINDINGS)


def examined(
    engines: Sequence[str], options: Mapping[str, str] = MappingProxyType({}), *, probe: bool = False
) -> list[Examination]:
    """Examines engines at the same time; a terminal shows that it waits for them.

    Args:
        engines: as URL or KIND=URL[,name=value…].
        options: further options of each, `kind` among them.
        probe: send two short requests to each.

    Raises:
        UnusableEngine: one of them cannot be examined.
    """
    from rich.console import Console  # noqa: PLC0415 - slow to import

    from proxy.observe.logs import configure_logs  # noqa: PLC0415 - the other clients start quicker without
    from proxy.settings import LogSettings  # noqa: PLC0415 - likewise

    async def all_of_them() -> list[Examination]:
        return await asyncio.gather(*(_examine(each, dict(options), probe=probe) for each in engines))

    configure_logs(LogSettings(level="error"))
    addresses = ", ".join(each.partition(",")[0] for each in engines)
    with Console(stderr=True).status(f"asking {addresses} …"):
        return asyncio.run(all_of_them())


async def _examine(text: str, options: dict[str, str], *, probe: bool) -> Examination:
    from engine_adapter import EngineError  # noqa: PLC0415 - see above
    from proxy.doctor.doctor import examine  # noqa: PLC0415 - see above
    from proxy.settings import SettingsError  # noqa: PLC0415 - see above

    address = ""
    try:
        spec, more = _engine_of(text, options)
        address = spec.url
        return await examine(spec, options=more, probe=probe)
    except (SettingsError, EngineError) as error:
        message = str(error)
        raise UnusableEngine(message if address in message else f"{address}: {message}") from error


def _engine_of(text: str, options: dict[str, str]) -> tuple[EngineSpec, dict[str, str]]:
    """The description of an engine given as URL or KIND=URL[,name=value…], and the options of its kind. The
    kind is empty where kvpin detects it. Raises SettingsError."""
    from proxy.settings import SettingsError, UndetectedSettings, parse_engine_flag  # noqa: PLC0415 - see above

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
