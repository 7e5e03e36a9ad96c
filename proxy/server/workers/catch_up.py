"""A worker that is started later follows what operators have ordered the others."""

from __future__ import annotations

from proxy.api.workers.merging_app import ORDERS_PATH
from proxy.api.workers.siblings import Siblings
from proxy.core.engine_book import EngineBook, decode_marks


async def catch_up(siblings: Siblings, book: EngineBook) -> None:
    """Takes over the orders about engines that the other workers know. This worker's own socket listens
    already: what is ordered from now on comes there."""
    for told in await siblings.told(ORDERS_PATH):
        book.merge(decode_marks(told))
