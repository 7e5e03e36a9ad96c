"""Replays of a recording that the request brings."""

from __future__ import annotations

import anyio
from starlette.requests import Request
from starlette.responses import Response

from proxy.api.admin.endpoint import Endpoint, Query, answer, read_bytes, until_left
from proxy.control.replays import MAX_TRACE_BYTES, OPTIONS, ReplayAnswer, Replays
from proxy.errors import BadRequest, ProxyError


def replay_routes(replays: Replays) -> tuple[Endpoint, ...]:
    """Shows what other engines, sizes and policies would do with recorded traffic."""

    async def post_replay(request: Request) -> Response:
        """Replays the body; ends if the client leaves."""
        trace = await read_bytes(request, MAX_TRACE_BYTES)
        outcome: ReplayAnswer | ProxyError = BadRequest("the client left")
        async with anyio.create_task_group() as group:
            group.start_soon(until_left, request.receive, group)
            try:
                outcome = await replays.play(trace, dict(request.query_params))
            except ProxyError as error:
                outcome = error
            group.cancel_scope.cancel()
        if isinstance(outcome, ProxyError):
            raise outcome
        return answer(outcome)

    return (
        Endpoint(
            "POST",
            "/replays",
            post_replay,
            "Replays the recording in the body (JSON lines, not compressed, 32 MiB at most) on simulated "
            "engines, as `kvpin replay` does; one at a time, 10 minutes at most each.",
            ReplayAnswer,
            raw_body=True,
            query=tuple(Query(name, "string", f"As --{name.replace('_', '-')}.") for name in OPTIONS),
        ),
    )
