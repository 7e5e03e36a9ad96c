"""The data-parallel ranks of servers: each rank has its own cache, and is an engine of its own.

A server tells its ranks when it connects. From then on, its entry in the settings stands for as many engines.
"""

from __future__ import annotations

from proxy.settings import EngineEntry, EngineSettings


class Ranks:
    """Answers of servers about their ranks, by address."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[int, ...]] = {}

    def learn(self, url: str, ranks: tuple[int, ...]) -> bool:
        """A server has these ranks; none if it does not tell. Whether that is new."""
        if not ranks or self._of.get(url, ranks[:1]) == ranks:
            return False
        if len(ranks) > 1:
            self._of[url] = ranks
        else:
            self.forget(url)
        return True

    def forget(self, url: str) -> None:
        """Nothing is known of a server."""
        self._of.pop(url, None)

    def split(self, entry: EngineEntry) -> list[EngineEntry]:
        """The engines that an entry stands for."""
        if not isinstance(entry, EngineSettings) or not entry.may_have_ranks:
            return [entry]
        ranks = self._of.get(entry.url)
        return [entry] if ranks is None else [entry.of_rank(rank) for rank in ranks]
