"""uvicorn's parts that kvpin's connections use: a release that changes one must fail here."""

import inspect
import re

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from proxy.http.http1 import Http1Protocol
from proxy.http.uvicorn_inner import Port
from tests.fakes import client_of


def test_protocols_are_made_as_uvicorn_makes_its_own():
    def names(protocol):
        return list(inspect.signature(protocol.__init__).parameters)

    assert names(Http1Protocol) == names(HttpToolsProtocol)
    assert callable(Http1Protocol.shutdown)
    assert callable(HttpToolsProtocol.shutdown)


async def test_a_port_reads_the_state_that_uvicorn_shares(engine):
    async def app(_exchange):
        raise NotImplementedError

    config, state = uvicorn.Config(app, interface="asgi3", lifespan="off", proxy_headers=False), ServerState()
    config.load()
    port = Port(config, state)
    assert (port.handler, port.idle_s) == (app, config.timeout_keep_alive)
    assert (type(state.connections), type(state.tasks), state.default_headers) == (set, set, [])
    state.default_headers = [(b"date", b"now")]  # uvicorn puts another list there, each second
    assert port.date == b"date: now\r\n"


async def test_answers_have_uvicorns_date_and_their_tasks_are_counted(engine, proxy):
    async with client_of(proxy) as client:
        answer = await client.get("/v1/models")
    assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", answer.headers["date"])
