"""Rules for starting an engine of each kind: command line, health route, directories and programs it needs.

`proxy` runs the processes; nothing is started here. `words` are the operator's command or options.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from engine_adapter.engine_command import check_torch, embedded_command
from engine_adapter.errors import EngineSpecError
from engine_adapter.llama_server import command as llama
from engine_adapter.llama_server.options import LlamaServerOptions, LlamaServerSpec
from engine_adapter.options import Size
from engine_adapter.torch_engine.serve import check_words
from engine_adapter.types import EngineSpec


def managed_command(kind: str, words: Sequence[str], *, port: int, spec: EngineSpec) -> list[str]:
    """The command line of an engine that listens on 127.0.0.1:`port`.

    Args:
        kind: its framework. `embedded` takes the options of `kvpin engine`; `llama_server` the options of a
            llama-server, with or without its name before them; any other the whole command line, in which
            `{port}` stands for the port.
        words: the options or the command line.
        port: the port.
        spec: the engine, completed by `managed_spec`.
    """
    return _of(kind).command(words, port, spec)


def managed_spec(spec: EngineSpec, words: Sequence[str]) -> EngineSpec:
    """`spec`, completed from the words and with the kind's defaults.

    Raises:
        EngineSpecError: the words contradict `spec`.
    """
    return _of(spec.kind).complete(spec, words)


def managed_advice(kind: str, words: Sequence[str]) -> tuple[str, ...]:
    """One sentence for each option in the words that reduces KV reuse."""
    return _of(kind).advice(words)


def check_command(kind: str, words: Sequence[str]) -> None:
    """Raises EngineSpecError for words that no engine of the kind accepts, on any machine."""
    _of(kind).check(words)


def prepare_managed(spec: EngineSpec, words: Sequence[str]) -> None:
    """Creates the engine's directories, and checks that its program and its model file exist.

    Args:
        spec: the engine, completed by `managed_spec`.
        words: as in `managed_command`.

    Raises:
        EngineSpecError: something is missing; the text says what to do.
    """
    _of(spec.kind).prepare(spec, words)


def health_path(kind: str) -> str:
    """The route that answers 2xx once the engine serves."""
    return _of(kind).health_path


@dataclass(frozen=True, slots=True)
class _Kind:
    """The rules for one kind of engine: one function for each of the module's."""

    command: Callable[[Sequence[str], int, EngineSpec[Any]], list[str]]
    check: Callable[[Sequence[str]], None]
    prepare: Callable[[EngineSpec[Any], Sequence[str]], None]
    complete: Callable[[EngineSpec[Any], Sequence[str]], EngineSpec] = lambda spec, _words: spec
    advice: Callable[[Sequence[str]], tuple[str, ...]] = lambda _words: ()
    health_path: str = "/health"


# --- embedded ------------------------------------------------------------------------------------


def _check_embedded(words: Sequence[str]) -> None:
    for word in words:
        if word.split("=")[0] in ("--port", "--host"):
            raise EngineSpecError(f"{word.split('=')[0]} is chosen by kvpin: leave it out")
    check_words(words)


# --- llama_server --------------------------------------------------------------------------------


def _llama_binary() -> str:
    return os.environ.get(llama.BINARY_VARIABLE) or llama.BINARY


def _complete_llama(spec: EngineSpec[Any], words: Sequence[str]) -> EngineSpec:
    given: LlamaServerOptions = spec.options
    said, host = llama.named_save_dir(words), _full(given.host_cache_dir)
    named = Path(said).absolute() if said else None  # the server does not expand ~
    if named and host and named != host:
        raise EngineSpecError(
            f"--slot-save-path {said!r} and host_cache_dir {given.host_cache_dir!r} differ: give one of them"
        )
    host, disk = named or host or llama.default_save_dir(), _full(given.disk_cache_dir)
    options = msgspec.structs.replace(
        given,
        host_cache_dir=str(host),
        host_cache_bytes=given.host_cache_bytes or Size(llama.default_save_bytes(host)),
        disk_cache_dir=str(disk) if disk else None,
    )
    return replace(spec, api_key=spec.api_key or llama.named_api_key(words), options=options)


def _full(directory: str | None) -> Path | None:
    return Path(directory).expanduser().absolute() if directory else None


def _prepare_llama(spec: LlamaServerSpec, words: Sequence[str]) -> None:
    llama.check_files(words, binary=_llama_binary())
    for directory in (spec.options.host_cache_dir, spec.options.disk_cache_dir):
        if directory is not None:
            llama.make_save_dir(Path(directory))


# --- any other -----------------------------------------------------------------------------------


def _check_line(words: Sequence[str]) -> None:
    if not any("{port}" in word for word in words):
        raise EngineSpecError("the command must say {port} where the engine's port belongs")


def _prepare_line(_spec: EngineSpec, words: Sequence[str]) -> None:
    if shutil.which(words[0]) is None:
        raise EngineSpecError(f"there is no program {words[0]!r}: install it, or give its full path")


_ANY = _Kind(
    command=lambda words, port, _spec: [word.replace("{port}", str(port)) for word in words],
    check=_check_line,
    prepare=_prepare_line,
)
_KINDS = {
    "embedded": _Kind(
        command=lambda words, port, _spec: embedded_command(words, port=port),
        check=_check_embedded,
        prepare=lambda _spec, _words: check_torch(),
    ),
    "llama_server": _Kind(
        command=lambda words, port, spec: llama.llama_server_command(
            words, port=port, save_dir=spec.options.host_cache_dir, binary=_llama_binary()
        ),
        check=llama.check_words,
        prepare=_prepare_llama,
        complete=_complete_llama,
        advice=llama.advice,
    ),
    "nim": replace(_ANY, health_path="/v1/health/ready"),
}


def _of(kind: str) -> _Kind:
    return _KINDS.get(kind, _ANY)
