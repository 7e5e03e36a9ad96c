"""A plain ASGI hop for `router_cost.py`: uvicorn and aiohttp, engines in turn, nothing else.

It runs in an environment of its own.

python benchmarks/asgi_hop.py PORT ENGINE_URL...
"""

from __future__ import annotations

import sys
from itertools import cycle
from typing import Any

import aiohttp
import uvicorn

_OWN = (b"host", b"connection", b"content-length", b"transfer-encoding")


class Hop:
    """Sends each request to the next engine and its answer back, as it comes."""

    def __init__(self, engines: list[str]) -> None:
        self._engines = cycle(engines)
        self._client: aiohttp.ClientSession | None = None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI
        """Serves one request."""
        if scope["type"] != "http":
            return
        if scope["path"] == "/health":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body"})
            return
        if self._client is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._client = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = [(name.decode(), value.decode()) for name, value in scope["headers"] if name not in _OWN]
        url = next(self._engines) + scope["path"]
        async with self._client.request(scope["method"], url, data=bytes(body), headers=headers) as answer:
            head = [
                (name.lower(), value)
                for name, value in answer.raw_headers
                if name.lower() not in (b"connection", b"transfer-encoding")
            ]
            await send({"type": "http.response.start", "status": answer.status, "headers": head})
            async for chunk in answer.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body"})


if __name__ == "__main__":
    uvicorn.run(
        Hop(sys.argv[2:]), port=int(sys.argv[1]), log_level="critical", access_log=False, lifespan="off"
    )
