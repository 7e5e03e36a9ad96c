"""`kvpin doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from proxy.cli.client import show
from proxy.cli.options import option

_FINDINGS, _UNUSABLE = 1, 2


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
    probe: Annotated[
        bool, typer.Option("--probe", help="Send two short requests and compare; a llama-server loses slots.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the examination as JSON.")] = False,
) -> None:
    """Examine an engine: what it is, what kvpin can do with it.

    Findings name the flag that would let kvpin do more.
    Exit status 0: no findings; 1: findings; 2: the engine cannot be examined.
    """
    from proxy.cli.engine_check.display import UnusableEngine, examined  # noqa: PLC0415 - slow to import

    given = {name: value for name, value in asdict(options).items() if value is not None}
    try:
        (examination,) = examined([engine], given, probe=probe)
    except UnusableEngine as error:
        typer.echo(f"kvpin: {error}", err=True)
        raise typer.Exit(_UNUSABLE) from None
    found = examination.as_json()
    show(found, "engine_check.display.show_examination", as_json=as_json)
    if found["findings"]:
        raise typer.Exit(_FINDINGS)
