"""The supervisor's orders to a worker: by an environment variable, and by a file that may change later."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from pydantic import SecretStr

from engine_adapter import EngineSpec
from proxy.settings import (
    WORKER_VARIABLE,
    EngineSettings,
    ExchangeSettings,
    Settings,
    SettingsError,
    StartedSettings,
    read_engines,
)

_ENGINES = "engines.json"
_REFUSED = "refused"


class Orders(msgspec.Struct, frozen=True):
    """The orders to one worker.

    Attributes:
        number: from 1 to `of`.
        listeners: descriptors of the listening sockets.
        directory: the supervisor's own directory, for sockets and the file of engines.
        follows: it takes the place of a worker that ended.
        recording_key: the workers' key of recordings, unless the settings have one.
    """

    number: int
    of: int
    listeners: tuple[int, ...]
    directory: str
    follows: bool = False
    recording_key: str = ""

    @classmethod
    def take(cls) -> Orders | None:
        """This process's orders; None if it is no worker. What it starts does not inherit them. Raises
        SettingsError if the variable is there, but no supervisor of this process set it."""
        text = os.environ.pop(WORKER_VARIABLE, None)
        if text is None:
            return None
        try:
            orders = msgspec.json.decode(text, type=cls)
            if Path(orders.directory).is_dir() and all(map(_is_socket, orders.listeners)):
                return orders
        except (msgspec.DecodeError, ValueError, OSError):
            pass
        raise SettingsError(
            f"{WORKER_VARIABLE} is set, but this process is no worker of `kvpin serve --workers`: unset it"
        )

    def variable(self) -> dict[str, str]:
        """The environment variable that says so."""
        return {WORKER_VARIABLE: msgspec.json.encode(self).decode()}

    def sockets(self) -> list[socket.socket]:
        """The listening sockets."""
        taken = [socket.socket(fileno=number) for number in self.listeners]
        for listener in taken:
            listener.set_inheritable(False)
        return taken

    def settings(self, load: Callable[[], Settings]) -> Settings:
        """The settings of this worker: those of `load`, but the engines that kvpin starts run already, and
        the workers share their requests. Raises SettingsError, also if the supervisor has refused them."""
        refused = Path(self.directory) / _REFUSED
        if refused.exists():
            raise SettingsError(refused.read_text(encoding="utf-8"))
        settings = load()
        run = read_engines(Path(self.directory) / _ENGINES)
        started = tuple(StartedSettings.model_validate(dict(engine)) for engine in run)
        changes: dict[str, Any] = {"engines": (*settings.engines, *started), "managed": ()}
        changes["name"] = f"{settings.shown_name}/{self.number}"
        if settings.reuse and settings.exchange is None:
            changes["exchange"] = ExchangeSettings.model_validate({"url": f"unix:{self.directory}"})
        if settings.state_dir is not None:
            changes["state_dir"] = settings.state_dir / f"worker-{self.number}"
        if settings.record_traffic_key is None and self.recording_key:
            changes["record_traffic_key"] = SecretStr(self.recording_key)
        return settings.model_copy(update=changes)


def write_engines(directory: Path, specs: list[EngineSpec]) -> None:
    """Tells workers which engines the supervisor runs, when they read their settings next. Raises OSError."""
    text = json.dumps({"engines": [_described(spec) for spec in specs]})
    new = directory / f".{_ENGINES}"
    new.write_text(text, encoding="utf-8")
    new.rename(directory / _ENGINES)


def write_refusal(directory: Path, error: str | None) -> None:
    """Tells workers why the supervisor refuses the settings as they are now; None if it takes them over.
    Raises OSError."""
    if error is None:
        (directory / _REFUSED).unlink(missing_ok=True)
    else:
        (directory / _REFUSED).write_text(error, encoding="utf-8")


def _described(spec: EngineSpec[Any]) -> dict[str, Any]:
    """An engine in the shape of the settings."""
    fields = {name: getattr(spec, name) for name in EngineSettings.model_fields}
    given = {**fields, **msgspec.structs.asdict(spec.options)}
    return {name: value for name, value in given.items() if value is not None}


def _is_socket(descriptor: int) -> bool:
    """Raises OSError if nothing is open there."""
    return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
