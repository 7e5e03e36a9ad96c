"""The answers of chats as engines send them, whole and in chunks, and their token counts."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from engine_adapter import UNREADABLE
from proxy.errors import EngineFailed


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


class _Function(Struct):
    name: str | None = None
    arguments: str | None = None


class ToolCall(Struct):
    """A call of a tool, or what a chunk adds to it."""

    index: int | None = None
    id: str | None = None
    function: _Function | None = None

    @property
    def name(self) -> str:
        """The tool's name; empty if this does not tell it."""
        return (self.function.name if self.function is not None else None) or ""

    @property
    def arguments(self) -> str:
        """Its arguments, or a piece of them."""
        return (self.function.arguments if self.function is not None else None) or ""


class ChatMessage(Struct):
    """A message, or what a chunk adds to it. Engines have either name for reasoning."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def thoughts(self) -> str:
        """Its reasoning."""
        return self.reasoning_content or self.reasoning or ""


class _Logprobs(Struct):
    content: list[Raw] | None = None


class Choice(Struct):
    """A choice. `stop_reason` (vLLM) and `matched_stop` (SGLang): the stop sequence, or the id of a token."""

    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | list[int] | None = None

    @property
    def stop_sequence(self) -> str | None:
        """The stop sequence that ended it."""
        return next((at for at in (self.stop_reason, self.matched_stop) if isinstance(at, str)), None)


class Error(Struct):
    """An engine's description of a failure."""

    message: str = ""
    code: str | int | None = None
    param: str | None = None


class Chat(Struct):
    """A whole answer, or a chunk of one. `timings` and `prompt_progress` are llama-server's, `request_id` is
    that of kvpin's own errors."""

    given: list[Choice] | None = msgspec.field(name="choices", default=None)
    model: str | None = None
    usage: ChatUsage | None = None
    error: Error | str | None = None
    request_id: str | None = None
    timings: Raw | UnsetType = UNSET
    prompt_progress: Raw | UnsetType = UNSET

    @property
    def choices(self) -> list[Choice]:
        """Its choices. A chunk with usage may have null there."""
        return self.given or []


_decode = msgspec.json.Decoder(Chat).decode


def read_chat(content: bytes) -> Chat:
    """A whole answer, or a chunk of one. Raises EngineFailed if it is none."""
    try:
        return _decode(content)
    except UNREADABLE as error:
        raise EngineFailed("the engine's answer is not that of a chat") from error
