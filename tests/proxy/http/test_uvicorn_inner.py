"""What kvpin relies on in uvicorn, and uvicorn does not document. If one fails, a release has changed it."""

import asyncio
import signal

from proxy.http.listeners import Door, listen
from proxy.http.uvicorn_inner import UvicornServer

MADE = []


async def site(_exchange):
    """Handles exchanges."""


class Recorded(asyncio.Protocol):
    """A connection that is counted until its client leaves."""

    def __init__(self, config, server_state, app_state, _loop=None):
        MADE.append((config, server_state, app_state))
        self.state = server_state

    def connection_made(self, transport):
        self.transport = transport
        self.state.connections.add(self)

    def connection_lost(self, exc):
        self.state.connections.discard(self)


async def test_it_makes_and_counts_connections_and_leaves_signals_and_the_stop_to_kvpin():
    stopped = []

    async def stop():
        stopped.append([*server.connections])
        for each in server.connections:
            each.transport.close()

    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    server = UvicornServer(site, Recorded, stop)
    with listen("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(server.serve([]))
        door = Door([listener], server.connect())
        _, client = await asyncio.open_connection(*listener.getsockname()[:2])
        async with asyncio.timeout(30):
            while not server.connections:  # noqa: ASYNC110 - uvicorn tells nobody
                await asyncio.sleep(0.01)
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
        own = server.connect()()
        other = server.connect(lambda *given: given)()
        taken, ours = MADE
        assert taken == ours == other
        config, state, app_state = taken
        assert (config.app, config.loaded_app, app_state) == (site, site, {})
        assert config.timeout_keep_alive == 75
        assert [name for name, _ in state.default_headers] == [b"date"]
        assert own.state is server.server_state
        state.tasks.add(serving)
        assert server.answers == {serving}
        server.should_exit = True
        async with asyncio.timeout(30):
            await serving
        assert [type(each) for [each] in stopped] == [Recorded]
        door.close()
        client.close()


async def test_told_before_its_start_it_stops_at_once():
    stopped = []

    async def stop():
        stopped.append(True)

    server = UvicornServer(site, Recorded, stop)
    server.should_exit = True
    async with asyncio.timeout(30):
        await server.serve([])
    assert stopped == [True]
