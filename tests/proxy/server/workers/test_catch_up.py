"""A worker that comes later, over real sockets."""

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from proxy.api.workers.merging_app import ORDERS_PATH
from proxy.api.workers.siblings import Siblings
from proxy.core.engine_book import EngineBook, encode_marks
from proxy.server.workers.catch_up import catch_up
from tests.proxy.api.workers.test_siblings import at_socket


async def test_it_knows_what_any_of_the_others_knows(tmp_path):
    def telling(book):
        return Starlette(routes=[Route(ORDERS_PATH, lambda _: Response(encode_marks(book.marks())))])

    second, third, learned = EngineBook(), EngineBook(), EngineBook()
    second.drain("gpu1:8000", drained=True, now=5.0)
    third.add("gpu2:8000", b"{}", now=5.0)
    sockets = [tmp_path / f"worker-{number}.http" for number in (2, 3, 4)]
    siblings = Siblings(sockets)  # the fourth does not run
    async with at_socket(telling(second), sockets[0]), at_socket(telling(third), sockets[1]):
        await catch_up(siblings, learned)
        await siblings.aclose()
    assert learned.is_drained("gpu1:8000")
    assert learned.added("gpu2:8000")


async def test_alone_it_has_nothing_to_do(tmp_path):
    siblings = Siblings([tmp_path / "worker-2.http"])
    await catch_up(siblings, EngineBook())
    await siblings.aclose()
