"""Starts an engine of each kind, also for the `kvpin engine` command. Imports no torch.

`proxy` runs the processes; nothing is started here. `words` are the operator's command or options.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from engine_adapter.errors import EngineSpecError
from engine_adapter.llama_server import command as llama
from engine_adapter.llama_server.options import LlamaServerOptions, LlamaServerSpec
from engine_adapter.options import Size
from engine_adapter.torch_engine.options import KEY_VARIABLE
from engine_adapter.torch_engine.serve import app, check_words
from engine_adapter.types import EngineSpec


@dataclass(frozen=True, slots=True)
class ManagedKind:
    """The rules for starting one kind of engine.

    Attributes:
        command: (words, port, completed spec) → the command line of an engine on 127.0.0.1:port. Words of
            `embedded` are options of `kvpin engine`; of `llama_server` options of a llama-server, with or
            without its name before them; of any other kind the whole line, with `{port}` for the port.
        check: raises EngineSpecError for words that no engine of the kind accepts, on any machine.
        prepare: (completed spec, words): makes its directories. Raises EngineSpecError where its program or
            model file is missing, and says what to do.
        complete: the spec, completed from the words and with the kind's defaults. Raises EngineSpecError
            where the words contradict it.
        advice: a sentence for each word that reduces KV reuse.
        health_path: the route that answers 2xx once the engine serves. It needs no key.
        key_variable: the environment variable by which the engine takes its key; None if it takes none so.
    """

    command: Callable[[Sequence[str], int, EngineSpec[Any]], list[str]]
    check: Callable[[Sequence[str]], None]
    prepare: Callable[[EngineSpec[Any], Sequence[str]], None]
    complete: Callable[[EngineSpec[Any], Sequence[str]], EngineSpec] = lambda spec, _words: spec
    advice: Callable[[Sequence[str]], tuple[str, ...]] = lambda _words: ()
    health_path: str = "/health"
    key_variable: str | None = None


def managed_kind(kind: str) -> ManagedKind:
    """The rules for a kind."""
    return _KINDS.get(kind, _ANY)


def run_engine_cli(args: Sequence[str]) -> None:
    """Runs the embedded engine with these arguments; ends with SystemExit. Raises EngineSpecError without
    torch."""
    _check_torch("the embedded engine needs torch: pip install 'kvpin[engine]'")
    app(args=list(args), prog_name="kvpin engine")


# --- embedded ------------------------------------------------------------------------------------


def _check_torch(advice: str) -> None:
    if find_spec("torch") is None:
        raise EngineSpecError(advice)


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


_ANY = ManagedKind(
    command=lambda words, port, _spec: [word.replace("{port}", str(port)) for word in words],
    check=_check_line,
    prepare=_prepare_line,
)
_KINDS = {
    "embedded": ManagedKind(
        # It exits when standard input closes.
        command=lambda words, port, _spec: [
            sys.executable,
            "-m",
            "engine_adapter.torch_engine",
            "--exit-with-parent",
            "--port",
            str(port),
            *words,
        ],
        check=_check_embedded,
        prepare=lambda _spec, _words: _check_torch(
            "embedded engines need torch: pip install 'kvpin[engine]', or name an engine with --engine"
        ),
        key_variable=KEY_VARIABLE,
    ),
    "llama_server": ManagedKind(
        command=lambda words, port, spec: llama.llama_server_command(
            words, port=port, save_dir=spec.options.host_cache_dir, binary=_llama_binary()
        ),
        check=llama.check_words,
        prepare=_prepare_llama,
        complete=_complete_llama,
        advice=llama.advice,
        key_variable="LLAMA_API_KEY",
    ),
    "nim": replace(_ANY, health_path="/v1/health/ready"),
}
