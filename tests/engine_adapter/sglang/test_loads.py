import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from engine_adapter import EngineRejected, EngineSpec, EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.sglang.loads import Loads
from tests.engines import served

RANK = {
    "dp_rank": 0,
    "num_running_reqs": 2,
    "num_waiting_reqs": 1,
    "token_usage": 0.25,
    "cache_hit_rate": 0.5,
}
OTHER = RANK | {"dp_rank": 1, "token_usage": 0.75, "cache_hit_rate": 1.0}


class Answers:
    """A server whose routes answer what a test says."""

    def __init__(self):
        self.told: dict[str, object] = {}

    def app(self):
        def answer(request):
            told = self.told.get(request.url.path)
            return JSONResponse({"detail": "Not Found"}, 404) if told is None else JSONResponse(told)

        return Starlette(routes=[Route("/{path:path}", answer)])

    def tell(self, *ranks):
        self.told["/v1/loads"] = {"loads": list(ranks)}


@pytest.fixture
def server():
    return Answers()


@pytest.fixture
async def loads(server):
    with served(server.app()) as url:
        controls = []

        def make(dp_rank=None):
            controls.append(ControlClient(EngineSpec("sglang", url, "e")))
            return Loads(controls[-1], dp_rank)

        yield make
        for control in controls:
            await control.aclose()


async def test_of_one_rank_and_of_all_together(server, loads):
    server.tell(RANK, OTHER)
    every, one = loads(), loads(1)
    load = await every.read()
    assert (load.running, load.waiting, load.gpu_usage, every.cache_hit_rate) == (4, 2, 0.75, 0.75)
    load = await one.read()
    assert (load.running, load.waiting, load.gpu_usage, one.cache_hit_rate) == (2, 1, 0.75, 1.0)


async def test_a_rank_that_is_not_there(server, loads):
    server.tell(RANK)
    with pytest.raises(EngineUnavailable, match="no dp_rank 3"):
        await loads(3).read()
    server.tell()
    with pytest.raises(EngineUnavailable, match="does not report its load"):
        await loads().read()


async def test_a_count_that_falls_means_another_process(server, loads):
    reader = loads()
    for count in (100, 100, 130):
        server.tell(RANK | {"total_prefill_uncached_tokens": count})
        await reader.read()
    server.tell(RANK | {"total_prefill_uncached_tokens": 40})
    with pytest.raises(EngineUnavailable, match="restarted"):
        await reader.read()
    reader.forget()
    await reader.read()


async def test_a_server_of_old(server, loads):
    server.told["/get_load"] = [{"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 9}]
    reader = loads()
    for _ in range(2):
        load = await reader.read()
        assert (load.running, load.waiting, load.gpu_usage, reader.cache_hit_rate) == (2, 1, None, None)


async def test_another_server(server, loads):
    server.told["/v1/loads"] = {"loads": [{"rank": 0}]}
    with pytest.raises(EngineUnavailable, match=r"/v1/loads.*not as expected"):
        await loads().read()
    server.told.clear()
    with pytest.raises(EngineRejected):
        await loads().read()
