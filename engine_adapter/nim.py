"""NVIDIA NIM as an engine: it is one of the others inside."""

from __future__ import annotations

from engine_adapter.openai_compatible import OpenAICompatibleAdapter


class NimAdapter(OpenAICompatibleAdapter):
    """`EngineAdapter` of NIM."""
