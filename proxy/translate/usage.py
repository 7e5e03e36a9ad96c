"""A chat's token counts, from which each API makes its own."""

from __future__ import annotations

from msgspec import Struct


class _PromptDetails(Struct):
    """`created_cache_tokens` is vLLM's name of `cache_write_tokens`."""

    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    created_cache_tokens: int | None = None


class _OutputDetails(Struct):
    reasoning_tokens: int | None = None


class ChatUsage(Struct):
    """The usage of a chat."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _OutputDetails | None = None

    @property
    def cached(self) -> int:
        """Prompt tokens that came from the cache."""
        details = self.prompt_tokens_details
        return (details.cached_tokens if details is not None else None) or 0

    @property
    def reasoning(self) -> int:
        """Tokens of the answer that are reasoning."""
        details = self.completion_tokens_details
        return (details.reasoning_tokens if details is not None else None) or 0

    def written(self, tokens_per_block: int | None) -> int:
        """Prompt tokens that the cache got: as the engine says, else those of new full blocks."""
        details = self.prompt_tokens_details or _PromptDetails()
        for told in (details.cache_write_tokens, details.created_cache_tokens):
            if told is not None:
                return told
        block = tokens_per_block or 1
        return max(self.prompt_tokens // block * block - self.cached, 0)
