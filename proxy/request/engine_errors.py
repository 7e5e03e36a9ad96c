"""Errors of an engine that leave a request to another one, and what the client gets when all fail."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import msgspec

from engine_adapter import EngineRejected, JsonBody, RequestBody
from engine_adapter.body import UnreadableField
from engine_adapter.causes import Code
from engine_adapter.http.answer_fields import EngineErrorBody
from engine_adapter.off_loop import JSON_BYTES_PER_MS, JsonInStrings, off_loop
from proxy.core.life import Cause
from proxy.errors import EngineFailed, Overloaded, ProxyError
from proxy.headers import RETRY_HEADERS, SHOULD_RETRY_HEADER
from proxy.request.calls import PROMPT_ROUTES, Call

# --- broken calls ---------------------------------------------------------------------------------------
# Calls of tools whose arguments are no JSON object. A model wrote them, the client keeps them in the talk,
# and most chat templates cannot read them: every further request of the conversation fails.

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
    param = None
    with suppress(UnreadableField):  # the engine's error says more of it
        ms = len(body.raw) / JSON_BYTES_PER_MS
        param = await off_loop(lambda: next(_broken(body.view("messages")), None), ms=ms)
    if param is None:
        return told
    message = f"{param} is no JSON object, and the chat template of the model cannot read it: {told.message}"
    return replace(told, message=message, param=param, type="invalid_request_error", is_clients=True)


def _broken(messages: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            match call:
                case {"function": {"arguments": str(text)}} if not _is_object(text):
                    yield f"messages[{index}].tool_calls[{number}].function.arguments"


def _is_object(text: str) -> bool:
    if JsonInStrings().is_too_much(text):  # perhaps
        return True
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


# --- engine errors --------------------------------------------------------------------------------------

# Statuses of an engine that could not serve the request: another engine may.
REFUSALS = frozenset({429, *range(500, 600)} - {501})
# Statuses of an engine that may refuse kvpin or the route rather than the request: another one tells.
_DENIALS = frozenset({401, 403, 405, 501})
# A 404 that is about the model, which each engine of a pool has: vLLM, SGLang and llama-server name it so.
_NO_MODEL = re.compile(
    r"\bmodel\b.*\b(not (exist|found|available|loaded)|unknown)|unknown model", re.IGNORECASE
)
# Statuses of an engine that has not got the route, or the file or batch that the route names.
NOT_HERE = frozenset({404, 405, 501})
# Statuses of an engine that takes no WebSocket: uvicorn has 403, also for an unknown route; others have 426.
_NO_WEBSOCKET = NOT_HERE | {403, 426}
# Routes without a prompt. Not all kinds of engines have them.
PASSED_ON = frozenset(f"/v1/{name}" for name in (
    "audio/speech", "audio/transcriptions", "audio/translations", "batches", "classify", "embeddings",
    "files", "images/edits", "images/generations", "images/variations", "moderations", "pooling", "rerank",
    "score", "uploads", "videos",
))  # fmt: skip


def cause_of_error(error: EngineRejected, call: Call, n_candidates: int, *, is_first: bool) -> Cause:
    """What an engine's error means: `ENGINE_REJECTED` if the request is at fault, else why another engine may
    answer it. `n_candidates`: engines that could have got the request, this one included. `is_first`: it is
    the first engine that was asked."""
    status = error.status
    if error.headers.get(SHOULD_RETRY_HEADER) == "false":  # so the engine says that the request is at fault
        return Cause.ENGINE_REJECTED
    if status in REFUSALS:
        return Cause.ENGINE_REFUSED
    if call.socket is not None:
        return Cause.ENGINE_LACKS if status in _NO_WEBSOCKET else Cause.ENGINE_REJECTED
    if status in NOT_HERE and n_candidates > 1 and call.route not in PROMPT_ROUTES:
        return Cause.ENGINE_LACKS
    is_denial = status in _DENIALS or (status == HTTPStatus.NOT_FOUND and _is_about_model(error))
    is_alone = n_candidates == 1 and is_first
    return Cause.ENGINE_DENIED if is_denial and not is_alone else Cause.ENGINE_REJECTED


def _is_about_model(error: EngineRejected) -> bool:
    about = error.param == "model" or error.engine_code == "model_not_found"
    return about or _NO_MODEL.search(str(error)) is not None


def engines_code(error: EngineRejected) -> str | None:
    """The code of an engine's error: the engine's own, else that of a 404."""
    if error.engine_code is not None or error.status != HTTPStatus.NOT_FOUND:
        return error.engine_code
    return Code.MODEL_NOT_FOUND if _is_about_model(error) else Code.NOT_FOUND


def is_no_websocket(status: int) -> bool:
    """True if an engine answers so where it takes no WebSocket: it may answer like a page."""
    return status in _NO_WEBSOCKET or 200 <= status < 400  # noqa: PLR2004 - HTTP


def final_error(failures: Sequence[Exception]) -> EngineRejected | ProxyError:
    """The client's error when every engine that was asked failed."""
    last = failures[-1]
    if all(isinstance(each, EngineRejected) for each in failures):
        last = failures[0]  # they agree that the request is at fault, and it said so first
    count = "1 engine" if len(failures) == 1 else f"{len(failures)} engines"
    failed = EngineFailed(f"{count} failed this request; the last said: {last}")
    error = last if isinstance(last, (EngineRejected, Overloaded)) else failed
    if len(failures) > 1 and not error.headers.keys() & {*RETRY_HEADERS}:
        # kvpin has retried already: more retries would only add load.
        error.headers = {**error.headers, SHOULD_RETRY_HEADER: "false"}
    return error
