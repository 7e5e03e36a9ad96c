"""Engine kinds: adapter and options of each, and how kvpin starts one. The only place that knows adapter
classes."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import msgspec

from engine_adapter.base import EngineAdapter
from engine_adapter.errors import EngineSpecError
from engine_adapter.events.options import EventAddresses, EventOptions
from engine_adapter.llama_server import command as llama
from engine_adapter.llama_server.adapter import LlamaServerAdapter
from engine_adapter.llama_server.options import ALL_ROUTES as LLAMA_SERVER_ROUTES
from engine_adapter.llama_server.options import LlamaServerOptions, LlamaServerSpec
from engine_adapter.lmdeploy import LMDeployAdapter
from engine_adapter.nim import NimAdapter, NimOptions
from engine_adapter.openai_compatible import ROUTES as OPENAI_SOCKETS
from engine_adapter.openai_compatible import OpenAICompatibleAdapter
from engine_adapter.options import EngineOptions, NativeRoute, OptionError, Size, read_options
from engine_adapter.sglang.adapter import SglangAdapter
from engine_adapter.sglang.requests import ROUTES as SGLANG_ROUTES
from engine_adapter.tensorrt_llm.adapter import TensorRTLLMAdapter
from engine_adapter.tensorrt_llm.discovery import ROUTES as TENSORRT_LLM_ROUTES
from engine_adapter.torch_engine.adapter import ROUTES as EMBEDDED_ROUTES
from engine_adapter.torch_engine.adapter import EmbeddedAdapter
from engine_adapter.torch_engine.serve import KEY_VARIABLE, app, check_words
from engine_adapter.types import EngineSpec, Role
from engine_adapter.vllm.options import ROUTES as VLLM_ROUTES
from engine_adapter.vllm.options import VllmOptions
from engine_adapter.vllm.tiered import make_vllm


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One kind of engine.

    Attributes:
        options: those it has beyond the options of `EngineSpec`.
        transfers: its engines can pass KV to each other, so they may have a role.
        tells_role: its engines say which half of requests they serve.
        routes: all routes beside `/v1`, and WebSockets, that its adapter may declare.
        keeps_apart: when such an engine keeps tenants' KV apart; empty where most do.
    """

    make: Callable[[EngineSpec[Any]], EngineAdapter]
    options: type[EngineOptions] = EngineOptions
    transfers: bool = False
    tells_role: bool = False
    routes: Mapping[str, NativeRoute] = field(default_factory=dict)
    keeps_apart: str = ""


KINDS = {
    "embedded": EngineKind(EmbeddedAdapter, routes=EMBEDDED_ROUTES),
    "openai_compatible": EngineKind(
        OpenAICompatibleAdapter, routes=OPENAI_SOCKETS, keeps_apart="such an engine never does"
    ),
    "llama_server": EngineKind(
        LlamaServerAdapter,
        LlamaServerOptions,
        routes=LLAMA_SERVER_ROUTES,
        keeps_apart="start the server with --cache-ram 0",
    ),
    "vllm": EngineKind(make_vllm, VllmOptions, transfers=True, routes=VLLM_ROUTES),
    "sglang": EngineKind(SglangAdapter, EventOptions, tells_role=True, routes=SGLANG_ROUTES),
    "tensorrt_llm": EngineKind(
        TensorRTLLMAdapter, EventAddresses, transfers=True, routes=TENSORRT_LLM_ROUTES
    ),
    "lmdeploy": EngineKind(LMDeployAdapter, keeps_apart="such an engine never does"),
    # mypy does not see the methods that it has from the adapter inside.
    "nim": EngineKind(lambda spec: cast("EngineAdapter", NimAdapter(spec, _as_kind)), NimOptions),
}

ENGINE_KINDS = tuple(KINDS)
ENGINE_OPTIONS: Mapping[str, tuple[str, ...]] = {
    name: kind.options.__struct_fields__ for name, kind in KINDS.items()
}
"""The names of each kind's own options."""
NATIVE_ROUTES: Mapping[str, NativeRoute] = {
    path: route for kind in KINDS.values() for path, route in kind.routes.items()
}
"""All routes beside `/v1`, and WebSockets, of all kinds of engines. No two kinds declare one differently."""


def make_options(kind: str, values: Mapping[str, object]) -> EngineOptions:
    """The options of an engine of `kind`, from names and values as the operator wrote them. Raises
    EngineSpecError: the kind does not exist; OptionError: an option is wrong."""
    check_kind(kind)
    return read_options(kind, KINDS[kind].options, values)


def make_adapter(spec: EngineSpec) -> EngineAdapter:
    """The adapter for `spec`; raises EngineSpecError for a kind that does not exist."""
    check_kind(spec.kind)
    kind = KINDS[spec.kind]
    if type(spec.options) is EngineOptions:
        spec = replace(spec, options=kind.options())
    return kind.make(spec)


def check_kind(kind: str) -> None:
    """Raises EngineSpecError, with the nearest name, for a kind that does not exist."""
    if kind in KINDS:
        return
    near = [known for known in ENGINE_KINDS if kind and known.startswith(kind)]
    near = near or difflib.get_close_matches(kind, ENGINE_KINDS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? It can be" if near else "use"
    raise EngineSpecError(f"unknown engine kind {kind!r}: {hint} one of {', '.join(ENGINE_KINDS)}")


def keeps_apart(kind: str) -> str:
    """When an engine of this kind keeps tenants' KV apart; empty where most do, or for an unknown kind."""
    return KINDS[kind].keeps_apart if kind in KINDS else ""


def check_role(kind: str, role: Role) -> None:
    """Raises OptionError for a role that engines of `kind` cannot have."""
    if role is Role.BOTH or KINDS[kind].transfers:
        return
    able = " engines, or between ".join(name for name, each in KINDS.items() if each.transfers)
    why = f"kvpin moves KV between {able} engines; leave role out"
    if KINDS[kind].tells_role:
        why = "each server says which half of requests it serves; leave role out"
    raise OptionError(f"{kind} engines cannot have role={role}: {why}", param="role")


def _as_kind(spec: EngineSpec, kind: str) -> EngineAdapter:
    """The adapter of another kind for the same server, with those options that kind has."""
    given, options = msgspec.structs.asdict(spec.options), KINDS[kind].options
    known = {name: given[name] for name in options.__struct_fields__ if name in given}
    return make_adapter(replace(spec, kind=kind, options=options(**known)))


# --- starts an engine of each kind, also for the `kvpin engine` command. Imports no torch ---------------
# `proxy` runs the processes; nothing is started here. `words` are the operator's command or options.


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


def _check_torch(advice: str) -> None:
    if find_spec("torch") is None:
        raise EngineSpecError(advice)


def _check_embedded(words: Sequence[str]) -> None:
    for word in words:
        if word.split("=")[0] in ("--port", "--host"):
            raise EngineSpecError(f"{word.split('=')[0]} is chosen by kvpin: leave it out")
    check_words(words)


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
