"""`kvpin serve` and `kvpin engine`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxy.cli.examples import example

if TYPE_CHECKING:
    from proxy.settings import Settings


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("serve", epilog=example("serve"))(serve)
    app.command(
        "engine",
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "help_option_names": [],
        },
        help="Serve the embedded engine; `kvpin engine --help` lists its options.",
    )(engine)


def serve(
    *,
    host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS[,ADDRESS…]", help="Addresses to listen on [127.0.0.1]."),
    ] = None,
    port: Annotated[int | None, typer.Option(metavar="PORT", help="Port, 0 for a free one [8000].")] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings in a TOML file.")] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=URL[,name=value…]",
            help="An engine that runs already; or one to start, written as for --managed. Repeatable.",
        ),
    ] = None,
    managed: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'KIND: command line'",
            help="An engine to start and watch, e.g. 'llama-server: -m model.gguf'. Repeatable.",
        ),
    ] = None,
    engines_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=SOURCE[,name=value…]",
            help="Where to find engines: dns://NAME:PORT, srv://NAME or kubernetes://NAMESPACE/SERVICE:PORT. "
            "Repeatable.",
        ),
    ] = None,
    engines_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Engines in a file that is watched, TOML or JSON.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", help="A client's key; each is its own tenant. Repeatable; or KVPIN_API_KEYS."
        ),
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Key of the admin API; or KVPIN_ADMIN_KEY.")
    ] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with that key; made with a random one if it is missing."),
    ] = None,
    reuse: Annotated[
        bool | None,
        typer.Option("--reuse/--no-reuse", help="Route by KV cache; or ENABLE_KV_CACHE_REUSE=1 [off]."),
    ] = None,
    model_alias: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=MODEL", help="A further name of a model or LoRA adapter. Repeatable."),
    ] = None,
    default_model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Serves requests for any other model, or for none.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Web pages from here may use /v1, e.g. https://chat.example; * for all. Repeatable.",
        ),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep what is known of the engines' caches there over a restart."),
    ] = None,
    exchange: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Act as one with other kvpins in front of the same engines: unix:/directory or redis://host.",
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Processes that serve the port together, as one [1].")
    ] = None,
    record_traffic: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Record requests for `kvpin replay`, as hashes without text."),
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="auto, json or pretty [auto].")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error [info].")
    ] = None,
) -> None:
    """Serve the proxy: OpenAI's API under /v1, the admin API under /admin/v1."""
    load = partial(
        _load,
        config,
        {
            "host": host,
            "port": port,
            "admin_key": admin_key,
            "admin_key_file": admin_key_file,
            "reuse": reuse,
            "default_model": default_model,
            "cors_origins": tuple(cors_origin or ()) or None,
            "state_dir": state_dir,
            "exchange": _given(url=exchange),
            "workers": workers,
            "record_traffic": record_traffic,
            "engines_file": engines_file,
            "api_keys": tuple({"key": key} for key in api_key or ()) or None,
            "logs": _given(format=log_format, level=log_level),
        },
        engine or [],
        managed or [],
        engines_from or [],
        model_alias or [],
    )
    raise typer.Exit(_run(load))


def _load(
    config: Path | None,
    flags: Mapping[str, Any],
    engine: list[str],
    managed: list[str],
    engines_from: list[str],
    model_alias: list[str],
) -> Settings:
    """The settings of flags, environment and file as they are now; raises SettingsError."""
    from proxy.settings import (  # noqa: PLC0415 - other commands start quicker
        load_settings,
        parse_alias_flags,
        parse_discovery_flag,
    )

    return load_settings(
        config,
        **flags,
        **_engines(engine, managed),
        discovery=tuple(parse_discovery_flag(text) for text in engines_from) or None,
        model_aliases=parse_alias_flags(model_alias) or None,
    )


def _engines(engine: list[str], managed: list[str]) -> dict[str, Any]:
    """The engines of `--engine` and `--managed`; raises SettingsError."""
    from proxy.settings import (  # noqa: PLC0415 - likewise
        is_command_line,
        parse_engine_flag,
        parse_managed_flag,
    )

    elsewhere = [parse_engine_flag(text) for text in engine if not is_command_line(text)]
    started = [parse_managed_flag(text, flag="--engine") for text in engine if is_command_line(text)]
    started += [parse_managed_flag(text) for text in managed]
    return {"engines": tuple(elsewhere) or None, "managed": tuple(started) or None}


def _given(**values: str | None) -> dict[str, str] | None:
    """The parts that were given; None for none."""
    return {name: value for name, value in values.items() if value is not None} or None


def _run(load: Callable[[], Settings]) -> int:
    """Serves until told to stop; returns the exit status."""
    from proxy.server import serve as run  # noqa: PLC0415 - likewise
    from proxy.settings import SettingsError  # noqa: PLC0415 - likewise

    try:
        return run(load)
    except SettingsError as error:
        for line in str(error).splitlines():
            typer.echo(f"kvpin: {line}", err=True)
        return 2


def engine(context: typer.Context) -> None:
    """Serve the embedded engine."""
    from engine_adapter import EngineSpecError, run_engine_cli  # noqa: PLC0415 - the clients start without

    try:
        run_engine_cli(context.args)
    except EngineSpecError as error:
        typer.echo(f"kvpin: {error}", err=True)
        raise typer.Exit(1) from error
