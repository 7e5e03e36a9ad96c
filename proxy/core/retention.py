"""How long a request wants its KV kept, from the fields of OpenAI's and Anthropic's clients.

    OpenAI      prompt_cache_options.ttl "30m" | "12h" · prompt_cache_retention "24h"; "in_memory" asks for nothing
                prompt_cache_breakpoint {"mode": "explicit", "ttl": …} on parts of messages or of the input
    Anthropic   cache_control {"type": "ephemeral", "ttl": "5m" | "1h"}, on the request or any part of it

The longest time counts, for the whole prompt. The fields go to the engine unchanged. A field that cannot be
read asks for nothing here; the engine rejects it if it is invalid.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from engine_adapter.body import JsonBody
from engine_adapter.types import Retention

# Above the priority of requests that ask for nothing, and the same for all clients.
PRIORITY = 1
# No API offers more than a day.
MAX_TTL_S = 86_400.0
# Anthropic's default, if a client names no time.
EPHEMERAL_S = 300.0

_DURATION = re.compile(r"(\d{1,9})([smhd])")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_CACHE_CONTROL = b"cache_control"
# Fields of an Anthropic request that have parts. Clients that translate put `cache_control` there in chats,
# too.
_PARTS = ("system", "messages", "tools")


def retention_of(body: JsonBody, owner: str | None = None) -> Retention:
    """The retention that a request asks for, on behalf of `owner`; priority 0 if it asks for nothing."""
    asked = [seconds for seconds in _asked(body) if seconds is not None]
    if not asked:
        return Retention(owner=owner)
    return Retention(PRIORITY, min(max(asked), MAX_TTL_S), owner)


def _asked(body: JsonBody) -> Iterator[float | None]:
    options = body.hint("prompt_cache_options")
    if isinstance(options, dict):
        yield _seconds(options.get("ttl"))
    yield _seconds(body.hint("prompt_cache_retention"))
    # Reading the messages takes as long as the rest of the parsing, and most requests have no such field.
    if _CACHE_CONTROL in body.raw:
        yield _ephemeral(body.hint("cache_control"))
        for name in _PARTS:
            yield from _of_parts(body.hint(name))


def _of_parts(parts: Any) -> Iterator[float | None]:  # noqa: ANN401 - JSON
    """The times of messages, of their blocks, and of the blocks of tool results."""
    stack = [parts]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack.extend(part)
        elif isinstance(part, dict):
            yield _ephemeral(part.get("cache_control"))
            stack.append(part.get("content"))


def _ephemeral(control: Any) -> float | None:  # noqa: ANN401 - JSON
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        return None
    return _seconds(control["ttl"]) if "ttl" in control else EPHEMERAL_S


def _seconds(value: Any) -> float | None:  # noqa: ANN401 - JSON
    """A duration as these APIs write it, or a number of seconds; None for anything else."""
    if isinstance(value, str):
        written = _DURATION.fullmatch(value)
        value = int(written[1]) * _UNITS[written[2]] if written else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(min(value, MAX_TTL_S)) if 0 < value < math.inf else None
