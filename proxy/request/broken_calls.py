"""Calls of tools whose arguments are no JSON object. A model wrote them, the client keeps them in the talk,
and most chat templates cannot read them: every further request of the conversation fails."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from engine_adapter import JsonBody, RequestBody
from engine_adapter.body import UnreadableField
from engine_adapter.http.error_bodies import EngineErrorBody
from engine_adapter.off_loop import JSON_BYTES_PER_MS, off_loop

# What engines say where they could not read such arguments: llama-server, those in Python, and templates.
_OF_ARGUMENTS = re.compile(
    r"tool call arguments|JSON|jinja|template|Expecting |line \d+ column \d+|item pairs|'items'",
    re.IGNORECASE,
)


async def naming_call(told: EngineErrorBody, body: RequestBody) -> EngineErrorBody:
    """An engine's error. If it is about arguments of an earlier call: as the client's fault, with the call's
    place. Another engine with the same template would not read them either."""
    if not isinstance(body, JsonBody) or not _OF_ARGUMENTS.search(told.message):
        return told
    param = await off_loop(partial(_first_broken, body), ms=len(body.raw) / JSON_BYTES_PER_MS)
    if param is None:
        return told
    message = f"{param} is no JSON object, and the chat template of the model cannot read it: {told.message}"
    return replace(told, message=message, param=param, type="invalid_request_error", is_clients=True)


def _first_broken(body: JsonBody) -> str | None:
    with suppress(UnreadableField):  # the engine's error says more of it
        return next(_broken(body.view("messages")), None)
    return None


def _broken(messages: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            match call:
                case {"function": {"arguments": str(text)}} if not _is_object(text):
                    yield f"messages[{index}].tool_calls[{number}].function.arguments"


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
