"""vLLM as an engine."""

from __future__ import annotations

from engine_adapter.openai_compatible import OpenAICompatibleAdapter


class VllmAdapter(OpenAICompatibleAdapter):
    """`EngineAdapter` of vLLM."""
