"""A TCP relay that stands between a client and a server, and holds up what passes."""

import asyncio


class Relay:
    """Passes connections on to a port of this machine.

    Attributes:
        delay_s: how late each byte comes, in either direction.
        port: where it listens.
    """

    def __init__(self, port):
        self.delay_s = 0.0
        self.port = 0
        self._to = port
        self._is_whole = asyncio.Event()
        self._is_whole.set()
        self._tasks = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self):
        """Passes nothing on, and keeps connections open, as a network that loses packets."""
        self._is_whole.clear()

    def heal(self):
        """Passes on what was held up, and all that comes."""
        self._is_whole.set()

    async def _serve(self, reader, writer):
        self._tasks.add(task := asyncio.current_task())
        writers = [writer]
        try:
            await self._is_whole.wait()
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._to)
            writers.append(up_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, up_writer))
                group.create_task(self._pass(up_reader, writer))
        except* (OSError, asyncio.CancelledError):
            pass  # one side is gone
        finally:
            for each in writers:
                each.transport.abort()
            self._tasks.discard(task)

    async def _pass(self, reader, writer):
        waiting = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write(waiting, writer))
            while data := await reader.read(1 << 16):
                waiting.put_nowait((asyncio.get_running_loop().time() + self.delay_s, data))
            waiting.put_nowait((0.0, b""))

    async def _write(self, waiting, writer):
        while True:
            due, data = await waiting.get()
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            await self._is_whole.wait()
            if not data:
                writer.close()
                return
            writer.write(data)
            await writer.drain()
