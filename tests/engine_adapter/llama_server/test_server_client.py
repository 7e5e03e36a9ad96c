import asyncio

import pytest

from engine_adapter.llama_server.router import MAX_TOKENISING, ServerClient
from engine_adapter.types import EngineSpec


@pytest.fixture
async def server():
    """A server that counts the requests which it has at once, and its client."""
    now, most = 0, 0

    async def serve(reader, writer):
        nonlocal now, most
        while await reader.readline():
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].split()[0])
            await reader.readexactly(size)
            now, most = now + 1, max(most, now + 1)
            await asyncio.sleep(0.01)
            now -= 1
            writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n{"tokens":[]}')
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        client = ServerClient(EngineSpec("llama_server", f"http://127.0.0.1:{port}", "e"))
        yield client, lambda: most
        await client.aclose()


async def test_a_burst_of_prompts_takes_few_of_the_servers_threads(server):
    client, most = server
    asked = [client.call("POST", "/tokenize", json={"content": str(n)}) for n in range(16)]
    assert await asyncio.gather(*asked) == [{"tokens": []}] * 16
    assert most() == MAX_TOKENISING
