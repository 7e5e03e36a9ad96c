"""Reads token counts from the usage of an answer. Each API has its own field names."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from engine_adapter.body import UNREADABLE, RawFields, decode_object
from engine_adapter.types import Usage


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _UsageFields(msgspec.Struct):
    """The fields of chats and completions, of responses, and of messages."""

    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None


class _AnswerFields(msgspec.Struct):
    usage: _UsageFields | None = None
    timings: object = None


NOTHING = Usage()
UNREAD = Usage()
"""The usage of an answer that could not be read."""
# Figures beyond these are no measurement: no answer has so many tokens, and no prefill takes weeks.
_MAX_TOKENS, _LEAST_MS, _MAX_MS = 1 << 31, 1e-3, 1e9
_decode_answer = msgspec.json.Decoder(_AnswerFields).decode
_decode_usage = msgspec.json.Decoder(_UsageFields).decode
_decode_any = msgspec.json.Decoder().decode
_decode_choices = msgspec.json.Decoder(list[RawFields]).decode
NULL = msgspec.Raw(b"null")
SAYS_NOTHING = (NULL, msgspec.Raw(b'""'), msgspec.Raw(b"[]"), msgspec.Raw(b"{}"))
"""Values of a field that add nothing to an answer."""
# Finds a usage object, also in a JSON text that was cut off. Generated text cannot contain it: quotes in JSON
# strings have a backslash.
USAGE_KEY = b'"usage"'
_USAGE = re.compile(USAGE_KEY + rb"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})")
_TOOL_CALLS = b'"tool_calls"'
_CALLED_TOOL = re.compile(rb'"finish_reason"\s*:\s*' + _TOOL_CALLS)
_TIMINGS_KEY = b'"timings"'
# The reason of the end and timings stand in the event of the last usage, or in one before it: events of other
# choices may come in between.
_BESIDE_BYTES = 8192
_TIMINGS = re.compile(_TIMINGS_KEY + rb"\s*:\s*(\{[^{}]*\})")


def read_answer_usage(content: bytes) -> Usage:
    """The usage of a JSON answer; `UNREAD` itself if it has an odd form, or is no JSON."""
    try:
        answer = _decode_answer(content)
    except UNREADABLE:
        return UNREAD
    return _told(_read(answer.usage), answer.timings, content)


def read_usage(usage: bytes) -> Usage:
    """The usage from a usage object alone."""
    try:
        return _read(_decode_usage(usage))
    except UNREADABLE:
        return NOTHING


def read_streamed_usage(part: bytes) -> Usage:
    """The usage in a part of an event stream: for each count, the last one reported."""
    cached = output = None
    last = 0  # where the last one stands
    for at, usage in _backwards(part):
        last = max(at, last)
        cached = usage.cached_tokens if cached is None else cached
        output = usage.output_tokens if output is None else output
        if cached is not None and output is not None:
            break
    begin = max(last - _BESIDE_BYTES, 0)
    return _told(Usage(cached, output), _last_timings(part, begin), part, begin)


def choices_of(chunk: RawFields) -> list[RawFields]:
    """The choices of a chunk; none where the engine left the field out, or has null there. Raises one of
    `UNREADABLE`."""
    choices = chunk.get("choices", NULL)
    return [] if choices == NULL else _decode_choices(choices)


def is_usage_alone(chunk: RawFields, choices: list[RawFields]) -> bool:
    """True if a chunk with usage says nothing else: some engines send it with a choice that adds nothing."""
    return "error" not in chunk and all(map(_adds_nothing, choices))


def _adds_nothing(choice: RawFields) -> bool:
    if "message" in choice:  # of a whole answer
        return False
    delta = choice.get("delta", NULL)
    added = {} if delta == NULL else decode_object(delta)
    beside = (value for name, value in choice.items() if name not in ("index", "delta"))
    return all(value in SAYS_NOTHING for value in (*beside, *added.values()))


def _last_timings(part: bytes, begin: int) -> object:
    """The last `timings` in a part of an event stream, from a place on; None without one."""
    found = _TIMINGS.match(part, at) if (at := part.rfind(_TIMINGS_KEY, begin)) >= 0 else None
    try:
        return _decode_any(found[1]) if found is not None else None
    except UNREADABLE:
        return None


def _backwards(part: bytes) -> Iterator[tuple[int, Usage]]:
    """Each usage, the last one first, and where it begins."""
    at = len(part)
    while (at := part.rfind(USAGE_KEY, 0, at)) >= 0:
        usage = _USAGE.match(part, at)
        if usage is not None:
            yield at, read_usage(usage[1])


def _read(usage: _UsageFields | None) -> Usage:
    if usage is None:
        return NOTHING
    details = usage.prompt_tokens_details or usage.input_tokens_details
    cached = details.cached_tokens if details is not None else usage.cache_read_input_tokens
    output = usage.completion_tokens if usage.completion_tokens is not None else usage.output_tokens
    return Usage(_count(cached), _count(output))


def _count(tokens: int | None) -> int | None:
    """A number of tokens, None for one that no engine can mean."""
    return tokens if tokens is not None and 0 <= tokens <= _MAX_TOKENS else None


def _told(usage: Usage, timings: object, answer: bytes, begin: int = 0) -> Usage:
    """The usage with the times of an answer's `timings`, as llama.cpp writes them, and what the answer, or
    its last part, ended with, from a place on."""
    if (
        answer.rfind(_TOOL_CALLS, begin) >= 0 and _CALLED_TOOL.search(answer) is not None
    ):  # found ten times as fast
        usage = msgspec.structs.replace(usage, called_tool=True)
    if not isinstance(timings, dict):
        return usage
    tokens, prefill_s = timings.get("prompt_n"), _seconds(timings.get("prompt_ms"))
    is_counted = isinstance(tokens, int) and 0 < tokens <= _MAX_TOKENS
    return msgspec.structs.replace(
        usage,
        prefill=(tokens, prefill_s) if is_counted and prefill_s is not None else None,
        decode_s=_seconds(timings.get("predicted_ms")),
    )


def _seconds(milliseconds: object) -> float | None:
    """A time that an engine reports; None for one that it cannot mean."""
    if isinstance(milliseconds, float | int) and _LEAST_MS <= milliseconds <= _MAX_MS:
        return milliseconds / 1000
    return None
