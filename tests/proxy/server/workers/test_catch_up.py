"""A worker that comes later, over real sockets."""

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from proxy.api.workers.missed_changes import PATH, Change, ChangeKind, Changes
from proxy.api.workers.siblings import Siblings
from proxy.core.drains import DrainBook
from proxy.server.workers.catch_up import carry_out, catch_up
from proxy.server.workers.orders import Orders
from tests.proxy.api.workers.test_siblings import at_socket


@pytest.fixture
def orders(tmp_path):
    return Orders(number=1, of=4, listeners=(), directory=str(tmp_path), follows=True)


async def test_it_does_what_the_one_that_knows_most_tells(orders, tmp_path):
    def telling(changes):
        return Starlette(routes=[Route(PATH, lambda _: Response(changes.told()))])

    async def carry_out(request):
        done.append((request.method, request.url.path, await request.body()))
        return Response(status_code=409 if len(done) == 1 else 204)

    done, drains, learned = [], DrainBook(), DrainBook()
    knows = Changes(drains)
    drains.order("gpu1:8000", drained=True, now=5.0)
    knows.note("a", Change(ChangeKind.ADD, "POST", "/admin/v1/engines", b"{}"))
    knows.note("b", Change(ChangeKind.REMOVE, "DELETE", "/admin/v1/engines/b", b""))
    own = Starlette(routes=[Route("/{path:path}", carry_out, methods=["POST", "DELETE"])])
    siblings = Siblings(orders.siblings)  # the fourth does not run
    async with (
        at_socket(own, tmp_path / "worker-1.http"),
        at_socket(telling(Changes(DrainBook())), tmp_path / "worker-2.http"),
        at_socket(telling(knows), tmp_path / "worker-3.http"),
    ):
        assert await catch_up(siblings, orders, learned) == []
        await siblings.aclose()
    assert learned.is_drained("gpu1:8000")
    assert done == [("POST", "/admin/v1/engines", b"{}"), ("DELETE", "/admin/v1/engines/b", b"")]


async def test_what_it_cannot_do_yet_is_done_later(orders, tmp_path):
    async def carry_out_if_there(request):
        return Response(status_code=204 if request.url.path in there else 404)

    there = {"/admin/v1/engines/a"}
    own = Starlette(routes=[Route("/{path:path}", carry_out_if_there, methods=["DELETE"])])
    of_one, of_rank = [
        Change(ChangeKind.REMOVE, "DELETE", f"/admin/v1/engines/{name}", b"") for name in ("a", "b-dp1")
    ]
    async with at_socket(own, tmp_path / "worker-1.http"):
        assert await carry_out([of_one, of_rank], orders) == [of_rank]
        there.add(of_rank.target)
        assert await carry_out([of_rank], orders) == []


async def test_alone_it_has_nothing_to_do(orders):
    siblings = Siblings(orders.siblings)
    await catch_up(siblings, orders, DrainBook())
    await siblings.aclose()
