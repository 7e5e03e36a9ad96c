"""Engine kinds, and how to make the adapter of each. The only place that knows adapter classes."""

from __future__ import annotations

from collections.abc import Callable

from engine_adapter.base import EngineAdapter
from engine_adapter.errors import EngineSpecError
from engine_adapter.llama_server.adapter import LlamaServerAdapter
from engine_adapter.openai_compatible import OpenAICompatibleAdapter
from engine_adapter.torch_engine.adapter import EmbeddedAdapter
from engine_adapter.types import EngineSpec

_ADAPTERS: dict[str, Callable[[EngineSpec], EngineAdapter]] = {
    "embedded": EmbeddedAdapter,
    "openai_compatible": OpenAICompatibleAdapter,
    "llama_server": LlamaServerAdapter,
    # Served through their OpenAI routes until their own adapters land; `is_generic` says so.
    "vllm": OpenAICompatibleAdapter,
    "sglang": OpenAICompatibleAdapter,
    "tensorrt_llm": OpenAICompatibleAdapter,
    "nim": OpenAICompatibleAdapter,
}

ENGINE_KINDS = tuple(_ADAPTERS)


def make_adapter(spec: EngineSpec) -> EngineAdapter:
    """The adapter for `spec`; raises EngineSpecError for a kind that does not exist."""
    factory = _ADAPTERS.get(spec.kind)
    if factory is None:
        raise EngineSpecError(f"unknown engine kind {spec.kind!r}: use one of {', '.join(ENGINE_KINDS)}")
    return factory(spec)


def is_generic(kind: str) -> bool:
    """True for a kind that is, for now, driven through its OpenAI routes alone."""
    return kind != "openai_compatible" and _ADAPTERS.get(kind) is OpenAICompatibleAdapter
