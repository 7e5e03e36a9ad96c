"""`kvpin serve` and `kvpin engine`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proxy.cli.examples import example
from proxy.cli.options import with_options

if TYPE_CHECKING:
    from proxy.settings import Settings


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("serve", epilog=example("serve"))(with_options(serve))
    app.command(
        "engine",
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "help_option_names": [],
        },
        help="Serve the embedded engine. `kvpin engine --help` lists its options.",
    )(engine)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The flags of `kvpin serve`, in the order of its help. None stands for one that is not given."""

    host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS[,ADDRESS…]", help="Addresses to listen on [127.0.0.1]."),
    ] = None
    port: Annotated[int | None, typer.Option(metavar="PORT", help="Port, 0 for a free one [8000].")] = None
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings in a TOML file.")] = None
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=URL[,name=value…]",
            help="An engine that runs already; or one to start, written as for --managed. Repeatable.",
        ),
    ] = None
    managed: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'KIND: command line'",
            help="An engine to start and watch, e.g. 'llama-server: -m model.gguf'. Repeatable.",
        ),
    ] = None
    engines_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=SOURCE[,name=value…]",
            help="Where to find engines: dns://NAME:PORT, srv://NAME or kubernetes://NAMESPACE/SERVICE:PORT. "
            "Repeatable.",
        ),
    ] = None
    engines_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Engines in a file that is watched, TOML or JSON.")
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", help="A client's key; each is its own tenant. Repeatable; or KVPIN_API_KEYS."
        ),
    ] = None
    admin_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Key of the admin API; or KVPIN_ADMIN_KEY.")
    ] = None
    admin_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with that key; made with a random one if it is missing."),
    ] = None
    reuse: Annotated[
        bool | None,
        typer.Option("--reuse/--no-reuse", help="Route by KV cache; or ENABLE_KV_CACHE_REUSE=1 [off]."),
    ] = None
    model_alias: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=MODEL", help="A further name of a model or LoRA adapter. Repeatable."),
    ] = None
    default_model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Serves requests for any other model, or for none.")
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Web pages from here may use /v1, e.g. https://chat.example; * for all. Repeatable.",
        ),
    ] = None
    state_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep what is known of the engines' caches there over a restart."),
    ] = None
    exchange: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Act as one with other kvpins in front of the same engines: unix:/directory or redis://host.",
        ),
    ] = None
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Processes that serve the port together, as one [1].")
    ] = None
    record_traffic: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Record requests for `kvpin replay`, as hashes without text."),
    ] = None
    log_format: Annotated[str | None, typer.Option(metavar="FORMAT", help="auto, json or pretty [auto].")] = (
        None
    )
    log_level: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error [info].")
    ] = None

    def settings(self) -> Settings:
        """The settings of flags, environment and file as they are now; raises SettingsError."""
        from proxy.settings import (  # noqa: PLC0415 - other commands start quicker
            Settings,
            is_command_line,
            load_settings,
            parse_alias_flags,
            parse_discovery_flag,
            parse_engine_flag,
            parse_managed_flag,
        )

        engines = self.engine or ()
        running = [parse_engine_flag(text) for text in engines if not is_command_line(text)]
        started = [parse_managed_flag(text, flag="--engine") for text in engines if is_command_line(text)]
        started += map(parse_managed_flag, self.managed or ())
        flags = {name: value for name, value in asdict(self).items() if name in Settings.model_fields}
        flags |= {
            "engines": tuple(running) or None,
            "managed": tuple(started) or None,
            "discovery": tuple(map(parse_discovery_flag, self.engines_from or ())) or None,
            "api_keys": tuple({"key": key} for key in self.api_key or ()) or None,
            "model_aliases": parse_alias_flags(self.model_alias or ()) or None,
            "cors_origins": tuple(self.cors_origin or ()) or None,
            "exchange": _given(url=self.exchange),
            "logs": _given(format=self.log_format, level=self.log_level),
        }
        return load_settings(self.config, **flags)


def serve(*, options: ServeOptions) -> None:
    """Serve OpenAI's API under /v1 and the admin API under /admin/v1."""
    from proxy.server import serve as run  # noqa: PLC0415 - likewise
    from proxy.settings import SettingsError  # noqa: PLC0415 - likewise

    try:
        status = run(options.settings)
    except SettingsError as error:
        for line in str(error).splitlines():
            typer.echo(f"kvpin: {line}", err=True)
        status = 2
    raise typer.Exit(status)


def _given(**values: str | None) -> dict[str, str] | None:
    """The parts that were given; None for none."""
    return {name: value for name, value in values.items() if value is not None} or None


def engine(context: typer.Context) -> None:
    """Serve the embedded engine."""
    from engine_adapter import EngineSpecError, run_engine_cli  # noqa: PLC0415 - the clients start without

    try:
        run_engine_cli(context.args)
    except EngineSpecError as error:
        typer.echo(f"kvpin: {error}", err=True)
        raise typer.Exit(1) from error
