"""Engine kinds: the adapter and the options of each. The only place that knows adapter classes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from engine_adapter.base import EngineAdapter
from engine_adapter.errors import EngineSpecError
from engine_adapter.events.options import EventAddresses, EventOptions
from engine_adapter.llama_server.adapter import LlamaServerAdapter
from engine_adapter.llama_server.options import LlamaServerOptions
from engine_adapter.llama_server.routes import ALL_ROUTES as LLAMA_SERVER_ROUTES
from engine_adapter.lmdeploy.adapter import LMDeployAdapter
from engine_adapter.nim import NimOptions, make_nim
from engine_adapter.openai_compatible import ROUTES as OPENAI_SOCKETS
from engine_adapter.openai_compatible import OpenAICompatibleAdapter
from engine_adapter.options import EngineOptions, OptionError, read_options
from engine_adapter.routes import NativeRoute
from engine_adapter.sglang.adapter import SglangAdapter
from engine_adapter.sglang.routes import ROUTES as SGLANG_ROUTES
from engine_adapter.tensorrt_llm.adapter import TensorRTLLMAdapter
from engine_adapter.tensorrt_llm.routes import ROUTES as TENSORRT_LLM_ROUTES
from engine_adapter.torch_engine.adapter import ROUTES as EMBEDDED_ROUTES
from engine_adapter.torch_engine.adapter import EmbeddedAdapter
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
    "nim": EngineKind(lambda spec: make_nim(spec, _as_kind), NimOptions),
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
    """The options of an engine of `kind`, from names and values as the operator wrote them.

    Raises:
        EngineSpecError: the kind does not exist; OptionError: an option is wrong.
    """
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
