"""kvpin's own port for tests: in this event loop, or in a thread."""

import asyncio
import contextlib
import threading
from functools import partial

import uvloop

from proxy.http.http1 import IDLE_S, Http1Protocol, Port
from proxy.http.listeners import MAX_CONNECTIONS, ConnectionLimits, Door, listen, plainly

# Seconds that running answers get at the end.
GRACE_S = 0.2


def port_of(handler, *, limit=MAX_CONNECTIONS, idle_s=IDLE_S):
    """A port whose requests `handler` answers."""
    return Port(handler, ConnectionLimits(limit), lambda _status: None, idle_s)


@contextlib.asynccontextmanager
async def opened(port, listener, begin=None, protocol=Http1Protocol):
    """Serves a listener. At the end, running answers get `GRACE_S`."""
    door = Door([listener], begin or plainly(partial(protocol, port)))
    try:
        yield
    finally:
        door.close()
        open_now, loop = port.limits.connections, asyncio.get_running_loop()
        port.stop()
        ends = loop.time() + GRACE_S
        while (open_now or port.answers) and loop.time() < ends:
            for each in [*open_now]:
                each.close_if_idle(0.0)
            await asyncio.sleep(0.001)
        for task in port.answers:
            task.cancel()
        for each in [*open_now]:
            each.abort()


@contextlib.contextmanager
def in_thread(port, begin_on=None, protocol=Http1Protocol):
    """Serves a free port of this machine in a thread; yields its address. `begin_on` makes what begins a
    connection, for a port."""

    async def serve():
        nonlocal end
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        end = partial(loop.call_soon_threadsafe, over.set)
        async with opened(port, listener, begin_on and begin_on(port), protocol):
            started.set()
            await over.wait()

    def run():
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    end, started = None, threading.Event()
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert started.wait(60)
        try:
            yield listener.getsockname()
        finally:
            end()
            thread.join(60)
