"""`kvpin doctor`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from proxy.cli.client import print_json
from proxy.cli.examples import example

if TYPE_CHECKING:
    from engine_adapter import EngineSpec

_FINDINGS, _UNUSABLE = 1, 2
# Stands for the kind until it is detected.
_UNKNOWN = "engine"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("doctor", epilog=example("doctor"))(doctor)


def doctor(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="The engine's address; or KIND=URL[,name=value…], as serve's --engine takes it.",
        ),
    ],
    *,
    kind: Annotated[str | None, typer.Option(metavar="KIND", help="Its framework [detected].")] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="The engine's key, if it needs one.")
    ] = None,
    events: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address of its KV events [the engine's own].")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="DIR_OR_ID", help="Its model's tokenizer [the engine's own].")
    ] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Send two short requests and compare.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the examination as JSON.")] = False,
) -> None:
    """Examine an engine: what it is, what kvpin can do with it, and which flag would let it do more.

    Exit status 0: no findings; 1: findings; 2: the engine cannot be examined.
    """
    from rich.console import Console  # noqa: PLC0415 - slow to import

    from engine_adapter import EngineError  # noqa: PLC0415 - the other clients start quicker without
    from proxy.doctor.doctor import examine  # noqa: PLC0415 - likewise
    from proxy.observe.logs import configure_logs  # noqa: PLC0415 - likewise
    from proxy.settings import LogSettings, SettingsError  # noqa: PLC0415 - likewise

    configure_logs(LogSettings(level="error"))
    options = {"kind": kind, "api_key": api_key, "events": events, "tokenizer": tokenizer}
    where = ""
    try:
        spec, more = engine_of(engine, {name: value for name, value in options.items() if value is not None})
        where = spec.url
        with Console(stderr=True).status(f"asking {where} …"):
            examination = asyncio.run(examine(spec, options=more, probe=probe))
    except (SettingsError, EngineError) as error:
        message = str(error)
        typer.echo(f"kvpin: {message if where in message else f'{where}: {message}'}", err=True)
        raise typer.Exit(_UNUSABLE) from None
    found = examination.as_json()
    if as_json:
        print_json(found)
    else:
        from proxy.cli.tables import show_examination  # noqa: PLC0415 - rich is slow to import

        show_examination(found)
    if found["findings"]:
        raise typer.Exit(_FINDINGS)


def engine_of(text: str, options: dict[str, str]) -> tuple[EngineSpec, dict[str, str]]:
    """The description of an engine given as URL or KIND=URL[,name=value…], and the options of its kind. The
    kind is empty where kvpin detects it.

    Raises:
        SettingsError: saying what is wrong.
    """
    from dataclasses import replace  # noqa: PLC0415 - see above

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
