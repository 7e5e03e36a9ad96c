"""Data-parallel ranks: one server, several engines, each with a cache of its own."""

from __future__ import annotations

from engine_adapter.http.prepare import RANK_HEADER


def rank_headers(rank: int | None) -> dict[str, str]:
    """The headers that send a request to a rank; none where the server is left to choose."""
    return {} if rank is None else {RANK_HEADER: str(rank)}


def addressable(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks of a server's metrics, if requests can name each; else none. A server with a part of all
    ranks (`--data-parallel-hybrid-lb`) counts its own from 0 in the header, but not in its metrics."""
    return ranks if ranks == tuple(range(len(ranks))) else ()
