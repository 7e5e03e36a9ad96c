"""`kvpin` and its commands. Here are `kvpin serve`, `kvpin engine` and `kvpin config`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proxy.cli import admin, doctor, measure, replay
from proxy.cli.arguments import App
from proxy.cli.client import fail, option

if TYPE_CHECKING:
    from proxy.settings import Settings


# --- `kvpin serve` and `kvpin engine` -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """The flags of `kvpin serve`, in the order of its help. None stands for one that is not given. A path is
    text here, because `Path("")` would be the working directory."""

    host: str | None = option("ADDRESS[,ADDRESS…]", "Addresses to listen on [127.0.0.1].")
    port: int | None = option("PORT", "Port, 0 for a free one [8000].")
    config: Path | None = option("FILE", "Settings in a TOML file.")
    engine: list[str] | None = option(
        "KIND=URL[,name=value…]",
        "An engine that runs already; or one to start, written as for --managed. Repeatable.",
    )
    managed: list[str] | None = option(
        "'KIND: command line'",
        "An engine to start and watch, e.g. 'llama-server: -m model.gguf'. Repeatable.",
    )
    engines_from: list[str] | None = option(
        "KIND=SOURCE[,name=value…]",
        "Where to find engines: dns://NAME:PORT, srv://NAME or kubernetes://NAMESPACE/SERVICE:PORT. "
        "Repeatable.",
    )
    engines_file: str | None = option("FILE", "Engines in a file that is watched, TOML or JSON.")
    api_key: list[str] | None = option(
        "KEY", "A client's key; each is its own tenant. Repeatable; or KVPIN_API_KEYS."
    )
    admin_key: str | None = option("KEY", "Key of the admin API; or KVPIN_ADMIN_KEY.")
    admin_key_file: str | None = option(
        "FILE", "File with that key; made with a random one if it is missing."
    )
    reuse: bool | None = option(
        None, "Route by KV cache; or ENABLE_KV_CACHE_REUSE=1 [off].", None, "--reuse/--no-reuse"
    )
    model_alias: list[str] | None = option(
        "NAME=MODEL", "A further name of a model or LoRA adapter. Repeatable."
    )
    normalise: list[str] | None = option(
        "RULE",
        "Change prompts so that more of them is cached: a rule of docs/normalise.md, or agents. Repeatable.",
    )
    default_model: str | None = option("MODEL", "Serves requests for any other model, or for none.")
    cors_origin: list[str] | None = option(
        "ORIGIN", "Web pages from here may use /v1, e.g. https://chat.example; * for all. Repeatable."
    )
    state_dir: str | None = option("DIR", "Keep what is known of the engines' caches there over a restart.")
    exchange: str | None = option(
        "URL",
        "Act as one with other kvpins in front of the same engines: unix:/directory or redis://host.",
    )
    workers: int | None = option("N", "Processes that serve the port together, as one [1].")
    record_traffic: str | None = option("FILE", "Record requests for `kvpin replay`, as hashes without text.")
    log_format: str | None = option("FORMAT", "auto, json or pretty [auto].")
    log_level: str | None = option("LEVEL", "debug, info, warning or error [info].")

    def settings(self) -> Settings:
        """The settings of flags, environment and file as they are now; raises SettingsError."""
        from proxy import settings as read  # noqa: PLC0415 - other commands start quicker

        given = self.engine or ()
        running = [read.parse_engine_flag(text) for text in given if not read.is_command_line(text)]
        lines = [text for text in given if read.is_command_line(text)]
        started = [read.parse_managed_flag(text, flag="--engine") for text in lines]
        started += map(read.parse_managed_flag, self.managed or ())
        flags = {name: value for name, value in asdict(self).items() if name in read.Settings.model_fields}
        logs = {"format": self.log_format, "level": self.log_level}
        flags |= {
            "engines": tuple(running) or None,
            "managed": tuple(started) or None,
            "discovery": tuple(map(read.parse_discovery_flag, self.engines_from or ())) or None,
            "api_keys": tuple({"key": key} for key in self.api_key or ()) or None,
            "model_aliases": read.parse_alias_flags(self.model_alias or ()) or None,
            "normalise": ({"rules": self.normalise},) if self.normalise else None,
            "cors_origins": tuple(self.cors_origin or ()) or None,
            "exchange": {"url": self.exchange} if self.exchange is not None else None,
            "logs": {name: value for name, value in logs.items() if value is not None} or None,
        }
        return read.load_settings(self.config, **flags)


def serve(*, options: ServeFlags) -> None:
    """Serve OpenAI's API under /v1 and the admin API under /admin/v1."""
    # One that comes while kvpin starts waits until the settings can be read again.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    from engine_adapter import EngineSpecError  # noqa: PLC0415 - other commands start quicker
    from proxy.server.run import serve as run  # noqa: PLC0415 - likewise
    from proxy.settings import SettingsError  # noqa: PLC0415 - likewise

    try:
        status = run(options.settings)
    except (SettingsError, EngineSpecError) as error:
        fail("\nkvpin: ".join(str(error).splitlines()), 2)
    raise typer.Exit(status)


def engine(context: typer.Context) -> None:
    """Serve the embedded engine."""
    from engine_adapter import EngineSpecError, run_engine_cli  # noqa: PLC0415 - the clients start without

    try:
        run_engine_cli(context.args)
    except EngineSpecError as error:
        fail(str(error))


# --- `kvpin config` -------------------------------------------------------------------------------------

_FAULTS = 2
config_app = App("Check settings.", "config", no_args_is_help=True)


@config_app.callback()
def config() -> None:
    """Check settings."""


@config_app.command("check")
def check(
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Settings in a TOML file [the one that KVPIN_CONFIG names]."),
    ] = None,
) -> None:
    """Check the settings file and the environment.

    Every fault is one sentence. Nothing is started. Exit status 2: there are faults. Keys that open nothing
    are warned of, rules that change no prompt, and a port that anyone may use.
    """
    from proxy.server import checks  # noqa: PLC0415 - other commands start quicker
    from proxy.settings import SettingsError, check_settings, settings_file  # noqa: PLC0415 - see above

    settings, faults = check_settings(config)
    if settings is not None:
        faults += _faults_of_this_machine(settings)
    for fault in faults:
        typer.echo(f"kvpin: {fault}", err=True)
    if settings is not None:
        with suppress(SettingsError):  # the issued keys cannot be read, which is a fault
            for warning in [
                *checks.warnings_of(settings),
                *[checks.OPEN_TO_ALL] * checks.is_open_to_all(settings),
            ]:
                typer.echo(f"kvpin: warning: {warning}", err=True)
    if settings is None or faults:
        raise typer.Exit(_FAULTS)
    file = settings_file(config)
    typer.echo(f"{file if file is not None else 'environment'}: {_summary(settings)}")


def _faults_of_this_machine(settings: Settings) -> Iterator[str]:
    """A sentence for each engine and file that cannot be used here."""
    from engine_adapter import EngineSpecError, make_adapter  # noqa: PLC0415 - see above
    from proxy.server.checks import faults_here  # noqa: PLC0415 - see above
    from proxy.settings import SettingsError, read_engines  # noqa: PLC0415 - see above

    yield from faults_here(settings)
    try:
        _together = [make_adapter(each.spec()) for each in settings.engines]  # they may contradict each other
        if settings.engines_file is not None:
            read_engines(settings.engines_file)  # `kvpin serve` waits for a better one
    except (EngineSpecError, SettingsError) as error:
        yield str(error)


def _summary(settings: Settings) -> str:
    sources = len(settings.discovery) + (settings.engines_file is not None)
    return (
        f"no faults; engines: {len(settings.engines)}, engines to start: {len(settings.managed)}, "
        f"sources of engines: {sources}, API keys: {len(settings.api_keys)}, "
        f"reuse: {'on' if settings.reuse else 'off'}"
    )


# --- `kvpin` and its commands ---------------------------------------------------------------------------

_WHAT = "An OpenAI-compatible reverse proxy that makes the KV caches of serving engines count."
app = App(_WHAT, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415 - imports an e-mail parser

        typer.echo(f"kvpin {version('kvpin')}")
        raise typer.Exit


@app.callback(help=_WHAT)
def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """An OpenAI-compatible reverse proxy that makes the KV caches of serving engines count."""


app.command()(serve)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)(engine)
for _function in (
    admin.stats,
    admin.flush,
    admin.offload,
    admin.restore,
    admin.warm,
    admin.pin,
    admin.route,
    admin.unpin,
    admin.requests,
    admin.usage,
    doctor.doctor,
    replay.replay,
    measure.advise,
    doctor.init,
    measure.top,
    measure.bench,
):
    app.command()(_function)
for _group in (admin.engines_app, admin.tables_app, admin.keys_app, config_app):
    app.add_typer(_group)


def main() -> None:
    """The entry point of `kvpin`."""
    try:
        app()
    except BrokenPipeError:
        # The reader of our output has ended, as in `kvpin stats | head`.
        sys.stderr.close()
        sys.exit(1)
