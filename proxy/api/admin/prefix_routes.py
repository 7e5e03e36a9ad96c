"""The prefix tree of the last prompts."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from proxy.api.admin.endpoint import Endpoint, Query, answer, int_query
from proxy.control.prefixes import MAX_DEPTH, MAX_PREFIXES, Prefixes, PrefixesAnswer

DEPTH, PREFIXES = 8, 200


def prefix_routes(prefixes: Prefixes) -> tuple[Endpoint, ...]:
    """Shows what engines hold of the last prompts."""

    async def get_prefixes(request: Request) -> Response:
        depth = int_query(request, "depth", DEPTH, MAX_DEPTH)
        most = int_query(request, "limit", PREFIXES, MAX_PREFIXES)
        under, words = request.query_params.get("under"), request.query_params.get("words") == "true"
        return answer(await prefixes.look(under, depth, most, words=words))

    return (
        Endpoint(
            "GET",
            "/prefixes",
            get_prefixes,
            "The prefix tree of the last prompts, and which engines hold what of it.",
            PrefixesAnswer,
            query=(
                Query("under", "string", "The id of the prefix to begin with; by default all prompts."),
                Query(
                    "depth", "integer", f"How many below each other, 1 to {MAX_DEPTH}; {DEPTH} by default."
                ),
                Query("words", "boolean", "With the first words of each: prompt text. By default without."),
                Query("limit", "integer", f"How many in all, 1 to {MAX_PREFIXES}; {PREFIXES} by default."),
            ),
        ),
    )
