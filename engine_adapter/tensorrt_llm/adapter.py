"""TensorRT-LLM as an engine."""

from __future__ import annotations

from engine_adapter.openai_compatible import OpenAICompatibleAdapter


class TensorRTLLMAdapter(OpenAICompatibleAdapter):
    """`EngineAdapter` of TensorRT-LLM."""
