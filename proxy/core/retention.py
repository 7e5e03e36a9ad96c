"""Reads how long a request wants its KV kept, from the fields of OpenAI's and Anthropic's clients.

    OpenAI      prompt_cache_options.ttl "30m" | "12h" · prompt_cache_retention "24h", not "in_memory"
                prompt_cache_breakpoint {"mode": "explicit", "ttl": …} on any part of messages or input
    Anthropic   cache_control {"type": "ephemeral", "ttl": "5m" | "1h"}, on the request or any part of it

The longest time counts, for the whole prompt. The fields go to the engine unchanged. A time that cannot be
read is refused: its client would wait for KV that nobody keeps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from engine_adapter.body import JsonBody
from engine_adapter.types import Retention
from proxy.errors import BadRequest

# Above the priority of requests that ask for nothing, and the same for all clients.
PRIORITY = 1
# No API offers more than a day.
MAX_TTL_S = 86_400.0
# Anthropic's default, if a client names no time.
EPHEMERAL_S = 300.0
# OpenAI's default for a breakpoint.
BREAKPOINT_S = 1800.0

_DURATION = re.compile(r"(\d{1,9})([smhd])")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_NOT_KEPT = ("in_memory", "in-memory")
# Characters of a wrong time that its error repeats.
_SHOWN = 40
_CACHE_CONTROL, _PROMPT_CACHE, _BREAKPOINT = b"cache_control", b"prompt_cache_", b"prompt_cache_breakpoint"
# Fields that have parts with such marks. Clients that translate put `cache_control` in chats, too.
_PARTS = ("system", "messages", "tools", "input")
# Fields of a part that have parts.
_WITHIN = ("content", "output")


def retention_of(body: JsonBody, owner: str | None = None) -> Retention:
    """The retention that a request asks for, on behalf of `owner`; priority 0 if it asks for nothing.

    Raises:
        BadRequest: naming a time that is none.
    """
    has_field = _CACHE_CONTROL in body.raw or _PROMPT_CACHE in body.raw
    asked = [seconds for seconds in _asked(body) if seconds is not None] if has_field else []
    if not asked:
        return Retention(owner=owner)
    return Retention(PRIORITY, min(max(asked), MAX_TTL_S), owner)


def _asked(body: JsonBody) -> Iterator[float | None]:
    options = body.hint("prompt_cache_options")
    ttl = _seconds(options.get("ttl"), "prompt_cache_options.ttl") if isinstance(options, dict) else None
    yield ttl
    kept = body.hint("prompt_cache_retention")
    yield None if kept in _NOT_KEPT else _seconds(kept, "prompt_cache_retention")
    # Reading the messages takes as long as the rest of the parsing, and most requests have no such field.
    if _CACHE_CONTROL in body.raw or _BREAKPOINT in body.raw:
        yield _ephemeral(body.hint("cache_control"))
        for name in _PARTS:
            yield from _of_parts(body.hint(name), ttl or BREAKPOINT_S)


def _of_parts(parts: Any, breakpoint_s: float) -> Iterator[float | None]:  # noqa: ANN401 - JSON
    """The times of messages, of their blocks, and of the blocks of tool results. `breakpoint_s` is that of a
    breakpoint without its own."""
    stack = [parts]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack.extend(part)
        elif isinstance(part, dict):
            yield _ephemeral(part.get("cache_control"))
            yield _explicit(part.get("prompt_cache_breakpoint"), breakpoint_s)
            stack.extend(map(part.get, _WITHIN))


def _explicit(mark: Any, default_s: float) -> float | None:  # noqa: ANN401 - JSON
    if not isinstance(mark, dict) or mark.get("mode") != "explicit":
        return None
    return _seconds(mark["ttl"], "prompt_cache_breakpoint.ttl") if "ttl" in mark else default_s


def _ephemeral(control: Any) -> float | None:  # noqa: ANN401 - JSON
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        return None
    return _seconds(control["ttl"], "cache_control.ttl") if "ttl" in control else EPHEMERAL_S


def _seconds(value: Any, field: str) -> float | None:  # noqa: ANN401 - JSON
    """A duration as these APIs write it, or a number of seconds; None if there is none."""
    given = value
    if isinstance(value, str):
        written = _DURATION.fullmatch(value)
        value = int(written[1]) * _UNITS[written[2]] if written else 0
    if given is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        shown = repr(given)[:_SHOWN]
        raise BadRequest(
            f"{field} is {shown}, which is no time: write it as '30m' or '12h', or as seconds", param=field
        )
    return float(min(value, MAX_TTL_S))
