"""Data-parallel ranks: one server, several engines, each with a cache of its own."""

from __future__ import annotations

from collections.abc import Mapping

_HEADER = "x-data-parallel-rank"


def rank_headers(rank: int | None) -> dict[str, str]:
    """The headers that send a request to a rank; none where the server is left to choose."""
    return {} if rank is None else {_HEADER: str(rank)}


def sent_to_rank(headers: Mapping[str, str], rank: int | None) -> Mapping[str, str]:
    """A request's headers with this rank, in place of any rank the client named."""
    if rank is None:
        return headers
    return {name: value for name, value in headers.items() if name.lower() != _HEADER} | rank_headers(rank)


def addressable(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks of a server's metrics, if requests can name each; else none. A server with a part of all
    ranks (`--data-parallel-hybrid-lb`) counts its own from 0 in the header, but not in its metrics."""
    return ranks if ranks == tuple(range(len(ranks))) else ()
