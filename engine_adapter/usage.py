"""The reused prompt tokens that an answer reports: the one place that knows where they stand."""

from __future__ import annotations

import re

import msgspec


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """The usage of a chat or completion, of a response, and of a message, in this order."""

    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Reused prompt tokens, None where it does not say."""
        details = self.prompt_tokens_details or self.input_tokens_details
        return details.cached_tokens if details is not None else self.cache_read_input_tokens


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_usage = msgspec.json.Decoder(_Usage).decode
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# A usage object, in whatever it lies and even if that was cut off; a quote in a text has a backslash.
USAGE_KEY = b'"usage"'
_USAGE = re.compile(USAGE_KEY + rb"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})")


def read_cached_tokens(content: bytes) -> int | None:
    """Reused prompt tokens by the usage of a JSON answer; None where it does not say."""
    try:
        usage = _decode_answer(content).usage
    except UNREADABLE:
        return None
    return usage.cached_tokens if usage is not None else None


def read_usage(usage: bytes) -> int | None:
    """Reused prompt tokens by a usage object itself."""
    try:
        return _decode_usage(usage).cached_tokens
    except UNREADABLE:
        return None


def read_streamed_cached_tokens(part: bytes) -> int | None:
    """The same from a part of an event stream: by the last usage in it that says so."""
    at = len(part)
    while (at := part.rfind(USAGE_KEY, 0, at)) >= 0:
        usage = _USAGE.match(part, at)
        cached = read_usage(usage[1]) if usage is not None else None
        if cached is not None:
            return cached
    return None
