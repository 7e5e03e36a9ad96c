"""A worker that is started later does what operators have had the others do."""

from __future__ import annotations

from http import HTTPStatus

from proxy.api.workers.missed_changes import PATH, Change, heard
from proxy.api.workers.siblings import Siblings
from proxy.core.drains import DrainBook
from proxy.server.workers.orders import Orders


async def catch_up(siblings: Siblings, orders: Orders, drains: DrainBook) -> list[Change]:
    """Carries out the changes that the other workers know, and drains what they have drained.

    Its own socket listens already, so that what is changed from now on comes there. Returns what can only be
    done later, see `carry_out`."""
    told = [heard(each) for each in await siblings.told(PATH)]
    for each in told:
        drains.merge(each.drains)
    # Another one may have just been started.
    return await carry_out(max((each.changes for each in told), key=len, default=[]), orders)


async def carry_out(changes: list[Change], orders: Orders) -> list[Change]:
    """Carries out changes. Returns those of engines that are not there: they may still be found, or be ranks
    of a server that has not connected."""
    own, left = Siblings([orders.http_socket]), list[Change]()
    for change in changes:
        content = [(b"content-type", b"application/json")]
        answers = await own.ask(change.method, change.target, content, change.body)
        left += [change for answer in answers if answer.status == HTTPStatus.NOT_FOUND]
    await own.aclose()
    return left
