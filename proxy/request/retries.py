"""Answers of an engine that leave a request to another one, and the error for the client when all fail."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from engine_adapter import EngineRejected
from proxy.errors import EngineFailed, Overloaded, ProxyError
from proxy.headers import RETRY_HEADERS, SHOULD_RETRY_HEADER
from proxy.request.calls import PROMPT_ROUTES, Call

# Statuses of an engine that could not serve the request: another engine may.
REFUSALS = frozenset({429, 500, 502, 503, 504})
# Statuses with which an engine leaves a request to another one that it got with KV of a further one.
ERRORS = frozenset(range(400, 600))
# Statuses of an engine that has not got the route, or the file or batch that the route names.
NOT_HERE = frozenset({404, 405, 501})
# Statuses of an engine that takes no WebSocket: uvicorn has 403, also for an unknown route; others have 426.
_NO_WEBSOCKET = NOT_HERE | {403, 426}
# Routes without a prompt. Not all kinds of engines have them.
PASSED_ON = frozenset(
    f"/v1/{name}"
    for name in (
        *("audio/speech", "audio/transcriptions", "audio/translations", "batches", "classify", "embeddings"),
        *("files", "images/edits", "images/generations", "images/variations", "moderations", "pooling"),
        *("rerank", "score", "uploads", "videos"),
    )
)


def refusals_of(call: Call, n_candidates: int) -> AbstractSet[int]:
    """Statuses with which an engine leaves the request to another one."""
    if call.socket is not None:
        return REFUSALS | _NO_WEBSOCKET
    # With a prompt, `NOT_HERE` is about the request.
    return REFUSALS if n_candidates == 1 or call.route in PROMPT_ROUTES else REFUSALS | NOT_HERE


def is_not_here(error: Exception) -> bool:
    """True if an engine has not got what the request asks for."""
    return isinstance(error, EngineRejected) and error.status in _NO_WEBSOCKET


def is_no_websocket(status: int) -> bool:
    """True if an engine answers so where it takes no WebSocket: it may answer like a page."""
    return status in _NO_WEBSOCKET or 200 <= status < 400  # noqa: PLR2004 - HTTP


def final_error(failures: Sequence[Exception]) -> EngineRejected | ProxyError:
    """The client's error when every engine that was asked failed."""
    last = failures[-1]
    count = "1 engine" if len(failures) == 1 else f"{len(failures)} engines"
    failed = EngineFailed(f"{count} failed this request; the last said: {last}")
    error = last if isinstance(last, (EngineRejected, Overloaded)) else failed
    if len(failures) > 1 and not error.headers.keys() & {*RETRY_HEADERS}:
        # kvpin has retried already: more retries would only add load.
        error.headers = {**error.headers, SHOULD_RETRY_HEADER: "false"}
    return error
