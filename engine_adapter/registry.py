"""Engine kinds, and how to make the adapter of each. The only place that knows adapter classes."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from engine_adapter.base import EngineAdapter
from engine_adapter.errors import EngineSpecError
from engine_adapter.llama_server.adapter import LlamaServerAdapter
from engine_adapter.nim import NimAdapter
from engine_adapter.openai_compatible import OpenAICompatibleAdapter
from engine_adapter.sglang.adapter import SglangAdapter
from engine_adapter.tensorrt_llm.adapter import TensorRTLLMAdapter
from engine_adapter.torch_engine.adapter import EmbeddedAdapter
from engine_adapter.types import EngineSpec
from engine_adapter.vllm.tiered import make_vllm

_ADAPTERS: dict[str, Callable[[EngineSpec], EngineAdapter]] = {
    "embedded": EmbeddedAdapter,
    "openai_compatible": OpenAICompatibleAdapter,
    "llama_server": LlamaServerAdapter,
    "vllm": make_vllm,
    "sglang": SglangAdapter,
    "tensorrt_llm": TensorRTLLMAdapter,
    "nim": lambda spec: NimAdapter(spec, make_adapter),
}

ENGINE_KINDS = tuple(_ADAPTERS)


def make_adapter(spec: EngineSpec) -> EngineAdapter:
    """The adapter for `spec`; raises EngineSpecError for a kind that does not exist."""
    check_kind(spec.kind)
    return _ADAPTERS[spec.kind](spec)


def check_kind(kind: str) -> None:
    """Raises EngineSpecError, with the nearest name, for a kind that does not exist."""
    if kind in _ADAPTERS:
        return
    near = [known for known in ENGINE_KINDS if kind and known.startswith(kind)]
    near = near or difflib.get_close_matches(kind, ENGINE_KINDS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? It can be" if near else "use"
    raise EngineSpecError(f"unknown engine kind {kind!r}: {hint} one of {', '.join(ENGINE_KINDS)}")
