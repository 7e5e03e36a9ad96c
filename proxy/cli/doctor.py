"""`kvpin doctor` and `kvpin init`: examine engines, and write settings for them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proxy.cli.client import fail, option, show

if TYPE_CHECKING:
    from proxy.cli.engine_check import Examination


# --- `kvpin doctor` -------------------------------------------------------------------------------------

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
    from proxy.cli.engine_check import UnusableEngine, examined  # noqa: PLC0415 - slow to import

    given = {name: value for name, value in asdict(options).items() if value is not None}
    try:
        (examination,) = examined([engine], given, probe=probe)
    except UnusableEngine as error:
        fail(str(error), _UNUSABLE)
    found = examination.as_json()
    show(found, "engine_check.show_examination", as_json=as_json)
    if found["findings"]:
        raise typer.Exit(_FINDINGS)


# --- `kvpin init` ---------------------------------------------------------------------------------------

_STDOUT = Path("-")
_FILE = Path("kvpin.toml")
_HEAD = """\
# Settings of kvpin, written by `kvpin init`. Every setting: docs/reference/settings.md.
#   kvpin config check --config {file}
#   kvpin serve --config {file}

host = "127.0.0.1"    # "0.0.0.0" lets other machines connect: then set api_keys
port = 8000
reuse = true          # route by KV cache
# admin_key = "…"     # without one, only this machine may use the admin API
# state_dir = "kvpin-state"    # keep over a restart what is known of the caches

# [[api_keys]]        # without any, everybody who reaches the port may use the engines
# key = "…"
# tenant = "acme"     # keys of one tenant share KV
"""


def init(
    engines: Annotated[
        list[str],
        typer.Argument(
            metavar="URL",
            help="Addresses of engines; or KIND=URL[,name=value…], as serve's --engine takes it.",
        ),
    ],
    *,
    output: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it; - prints.")] = _FILE,
    force: Annotated[bool, typer.Option("--force", help="Replace the file, if there is one.")] = False,
) -> None:
    """Ask engines what they are, and write a settings file.

    Each setting has a comment; the file is for `kvpin serve --config`.
    """
    from proxy.cli.engine_check import UnusableEngine, examined  # noqa: PLC0415 - slow to import

    if output != _STDOUT and os.path.lexists(output) and not force:
        fail(f"{str(output)!r} exists: name another file with --output, or give --force")
    try:
        found = zip(examined(engines), map(_given, engines), strict=True)
    except UnusableEngine as error:
        fail(str(error).replace("\n", "\nkvpin: "))
    head = _HEAD.format(file=_plain(str(_FILE if output == _STDOUT else output)))
    text = "\n".join([head, *(_entry(examination, options) for examination, options in found)])
    if output == _STDOUT:
        typer.echo(text, nl=False)
        return
    try:
        output.touch(mode=0o600)  # it may hold keys
        if force and output.is_file():
            output.chmod(0o600)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{str(output)!r} cannot be written: {error.strerror}")
    typer.echo(f"wrote {output}; start with: kvpin serve --config {output}")


def _entry(found: Examination, options: Mapping[str, str]) -> str:
    """One engine: what it is, what keeps kvpin from using it fully, and its settings."""
    info = found.info
    comments = [
        f"{found.spec.kind} {info.version}: serves {info.model or ', '.join(info.models)}",
        f"{found.tokenisation.detail}; {found.view.detail}",
    ]
    for finding in found.findings:
        comments.append(f"Finding: {finding.problem}")
        comments += [f"Remedy: {finding.remedy}"] if finding.remedy else []
    settings = {"kind": found.spec.kind, "url": found.spec.url, **options}
    # JSON writes a string as TOML does.
    values = (f"{name} = {json.dumps(str(value), ensure_ascii=False)}" for name, value in settings.items())
    return "\n".join([*(f"# {_plain(line)}" for line in comments), "[[engines]]", *values]) + "\n"


def _given(text: str) -> dict[str, str]:
    """The options of KIND=URL[,name=value…] and URL[,name=value…]."""
    pairs = (option.partition("=") for option in text.split(",")[1:])
    return {name.strip().replace("-", "_"): value.strip() for name, _, value in pairs}


def _plain(text: str) -> str:
    """One line. TOML's comments hold no control characters, and an engine chooses its model's name."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
