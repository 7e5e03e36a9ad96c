"""Which failures of an engine let a request go to another one, and what the client gets when all fail."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

from engine_adapter import EngineError, EngineRejected, EngineUnavailable, JsonBody
from proxy.errors import EngineFailed
from proxy.headers import RETRY_HEADERS, SHOULD_RETRY_HEADER
from proxy.request.calls import PROMPT_ROUTES, Call

# Statuses of an engine that could not serve the request: another engine may.
REFUSALS = frozenset({429, 500, 502, 503, 504})
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
# A request that broke the connections of this many engines is probably the cause: it is not retried.
_MAX_DROPPED = 2


def refusals_of(call: Call, n_candidates: int) -> AbstractSet[int]:
    """Statuses with which an engine leaves the request to another one."""
    if call.socket is not None:
        return REFUSALS | _NO_WEBSOCKET
    # With a prompt, `NOT_HERE` is about the request.
    return REFUSALS if n_candidates == 1 or call.route in PROMPT_ROUTES else REFUSALS | NOT_HERE


def is_not_here(error: EngineError) -> bool:
    """Whether an engine has not got what the request asks for."""
    return isinstance(error, EngineRejected) and error.status in _NO_WEBSOCKET


def is_no_websocket(status: int) -> bool:
    """Whether an engine answers so where it takes no WebSocket: it may answer like a page."""
    return status in _NO_WEBSOCKET or 200 <= status < 400  # noqa: PLR2004 - HTTP


def may_retry(call: Call, failures: Collection[EngineError], retries: int) -> bool:
    """Whether another engine may be tried after these failures."""
    is_repeatable = call.body is None or isinstance(call.body, JsonBody)  # a streamed body is gone
    dropped = sum(isinstance(error, EngineUnavailable) and error.dropped for error in failures)
    failed = sum(not is_not_here(error) for error in failures)
    return is_repeatable and dropped < _MAX_DROPPED and failed <= retries


def final_error(failures: Sequence[EngineError]) -> EngineRejected | EngineFailed:
    """The client's error when every engine that was asked failed."""
    last = failures[-1]
    failed = EngineFailed(f"{len(failures)} engine(s) failed this request; the last said: {last}")
    error = last if isinstance(last, EngineRejected) else failed
    if len(failures) > 1 and not error.headers.keys() & {*RETRY_HEADERS}:
        # kvpin has retried already: more retries would only add load.
        error.headers = {**error.headers, SHOULD_RETRY_HEADER: "false"}
    return error
