"""The other workers, asked over real sockets."""

import asyncio
import contextlib
import socket

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from proxy.api.workers import siblings as siblings_module
from proxy.api.workers.siblings import Siblings


@contextlib.asynccontextmanager
async def at_socket(app, path):
    """Serves an application at a Unix socket."""
    server = uvicorn.Server(uvicorn.Config(app, uds=str(path), log_config=None, lifespan="off"))
    with contextlib.suppress(asyncio.CancelledError):
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        try:
            yield
        finally:
            server.should_exit = True
            await serving


async def echo(request):
    body = (await request.body()).decode()
    return JSONResponse([request.method, request.url.query, request.headers.get("accept"), body], 202)


async def test_those_that_run_answer_and_others_are_passed_over(tmp_path):
    app = Starlette(routes=[Route("/x", echo, methods=["POST"])])
    siblings = Siblings([tmp_path / "1.http", tmp_path / "2.http"])
    async with at_socket(app, tmp_path / "1.http"):
        (answer,) = await siblings.ask("POST", "/x?a=1", [(b"accept", b"text/plain")], b"hi")
        assert (answer.status, answer.is_good, answer.body) == (
            202,
            True,
            b'["POST","a=1","text/plain","hi"]',
        )
        await siblings.aclose()


async def test_what_is_shown_is_shown_without_one_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(siblings_module, "_SHOW_S", 0.05)
    siblings = Siblings([tmp_path / "1.http"])
    with socket.socket(socket.AF_UNIX) as hung:  # takes connections and answers nothing
        hung.bind(str(tmp_path / "1.http"))
        hung.listen()
        assert await siblings.ask("GET", "/metrics", [], b"") == []
        with pytest.raises(TimeoutError):  # a change may take its time
            await asyncio.wait_for(siblings.ask("POST", "/flush", [], b""), 0.5)
    await siblings.aclose()
