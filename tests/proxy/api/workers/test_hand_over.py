"""A worker hands over what it counted, and its events, to the one that speaks for all."""

import asyncio
import contextlib

import httpx
import msgspec
from starlette.applications import Starlette

from engine_adapter import HttpTransport
from proxy.api.hand_over import HAND_OVER_PATH, Handed, HandOver
from proxy.api.siblings import Siblings
from proxy.api.together import peer_routes
from proxy.control.engines import stats
from proxy.control.live import Live
from proxy.core.audit import Unchecked
from proxy.core.placement.load import Work
from proxy.fleet.fleet import Fleet
from proxy.observe.metrics import OTHER_TENANTS, Metrics
from proxy.request.records import RequestRecord
from proxy.runtime import Supervisor
from tests.fakes import add_ready
from tests.proxy.api.workers.test_siblings import at_socket


class Worker:
    """One worker of two, with an engine."""

    def __init__(self, directory, number):
        self.fleet, self.tasks, self.siblings = Fleet(), Supervisor(), Siblings(directory, number, 2)
        self.engine = add_ready(self.fleet, "a")
        self.metrics, self.transport = Metrics(self.fleet, tenants=1), HttpTransport()
        self.live = Live(self.fleet, self.metrics, self.tasks, asyncio.Event(), reuse=True)
        given = self.siblings, self.transport, self.fleet, self.metrics, self.live
        self.part = HandOver(*given, is_shared=False)
        self.app = Starlette(routes=peer_routes({HAND_OVER_PATH: self.part.receive}))

    def serve(self, tenant="t"):
        """A request was answered."""
        self.engine.served += 1
        self.fleet.passed_on["vm:7"] += 1
        self.engine.audit.observe(32, 32)
        self.engine.audit.skip(Unchecked.NOT_FIRM)
        record = RequestRecord("r", 0.0, "/v1/x", "m", tenant, stream=True)
        record.status, record.duration_s, record.output_tokens = 200, 0.5, 7
        self.metrics.observe(record)
        self.live.finished(record)

    @property
    def counted(self):
        """Requests that the page and the engine's statistics count."""
        lines = self.metrics.render().decode().splitlines()
        page = [line for line in lines if line.startswith("kvpin_request_duration_seconds_count")]
        audit = self.engine.audit.view()
        assert self.engine.served == audit.checked == audit.unchecked.get(Unchecked.NOT_FIRM, 0)
        assert self.engine.served == self.metrics.ended == self.fleet.passed_on["vm:7"]
        return self.engine.served, sum(float(line.split()[-1]) for line in page)


@contextlib.asynccontextmanager
async def two_workers(tmp_path):
    one, two = Worker(tmp_path, 1), Worker(tmp_path, 2)
    assert one.siblings.speaks()
    async with at_socket(one.app, one.siblings.own):
        yield one, two
    for each in (one, two):
        await each.transport.aclose()
        await each.tasks.stop()


async def test_what_is_handed_over_counts_once_and_at_the_other_worker_alone(tmp_path):
    async with two_workers(tmp_path) as (one, two):
        one.serve()
        for served in range(3):
            two.serve()
            await two.part.once()
            await one.part.once()  # it speaks, and hands over nothing
            assert (one.counted, two.counted) == ((served + 2, served + 2), (0, 0))
        total = (await stats(one.fleet, [], reuse=True)).totals
        assert (total.served, total.predictions_exact, total.predicted_cached_tokens) == (4, 4, 128)
        page = one.metrics.render().decode()
        assert 'kvpin_tenant_requests_total{status="200",tenant="t"} 4.0' in page
        two.serve("another tenant")
        await two.part.once()
        assert f'kvpin_tenant_requests_total{{status="200",tenant="{OTHER_TENANTS}"}} 1.0' in (
            one.metrics.render().decode()
        )


async def test_a_message_that_comes_twice_counts_once(tmp_path):
    async with two_workers(tmp_path) as (one, two):
        two.serve()
        body = msgspec.msgpack.encode(two.part._take())
        await one.part.receive(body)
        await one.part.receive(body)
        assert one.counted == (1, 1)
        again = msgspec.structs.replace(msgspec.msgpack.decode(body, type=Handed), run=0)  # started anew
        await one.part.receive(msgspec.msgpack.encode(again))
        assert one.counted == (2, 2)


async def test_what_nobody_took_is_handed_to_the_next_that_speaks(tmp_path):
    async with two_workers(tmp_path) as (one, two):
        one.serve()
        two.serve()
    await two.part.once()  # nobody listens
    two.serve()
    one.siblings.retire()
    await two.part.once()
    assert two.siblings.speaks()
    assert two.counted == (2, 2)
    async with at_socket(two.app, two.siblings.own):
        await one.part.once()
    assert (one.counted, two.counted) == ((0, 0), (3, 3))
    await one.transport.aclose()
    await two.transport.aclose()


async def test_what_goes_on_now_is_of_both_while_both_are_heard(tmp_path, monkeypatch):
    async with two_workers(tmp_path) as (one, two):
        for each in (one, two):
            each.engine.ledger.begin(0.0, 1.0, Work(10))
        await two.part.once()
        assert one.engine.in_flight == 2
        assert 'kvpin_engine_in_flight{engine="a"} 2.0' in one.metrics.render().decode()
        monkeypatch.setattr("proxy.api.hand_over._SILENT_S", -1.0)
        await one.part.once()
        assert one.engine.in_flight == 1
        one.fleet.book.drain("gpu1:8000", drained=True, now=5.0)
        await two.part.once()
        assert two.fleet.book.is_drained("gpu1:8000")  # what was ordered about engines comes with the answer


async def test_nobody_but_a_worker_may_ask_what_workers_ask(tmp_path):
    worker = Worker(tmp_path, 1)
    transport = httpx.ASGITransport(worker.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://kvpin") as stranger:
        assert (await stranger.post(HAND_OVER_PATH, content=b"x")).status_code == 404


async def test_who_watches_one_sees_the_requests_of_both(tmp_path):
    async with two_workers(tmp_path) as (one, two):
        viewer = one.live.join()
        await two.part.once()  # it learns that somebody watches
        two.serve()
        await two.part.once()
        events = await viewer.take()
        assert events.count(b"event: snapshot") == 1
        assert events.count(b"event: finished") == 1
        assert one.live.snapshot().requests == 1
        one.live.leave(viewer)
        await two.part.once()
        assert not two.live.viewers


async def test_ten_thousand_requests_are_one_message_of_a_few_kilobytes(tmp_path):
    async with two_workers(tmp_path) as (_, two):
        for _ in range(10_000):
            two.serve()
        assert len(msgspec.msgpack.encode(two.part._take())) < 8192
