"""The other workers, asked over real sockets."""

import asyncio
import contextlib
import os
import signal
import socket
import stat

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from structlog.testing import capture_logs

from proxy.api.workers import siblings as siblings_module
from proxy.api.workers.siblings import Siblings
from proxy.http.listeners import listen
from proxy.server import run
from proxy.settings import EngineSettings, Settings


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


ENGINE = EngineSettings(kind="vllm", url="http://127.0.0.1:1", id="a")


async def test_a_peer_may_ask_for_everything_without_a_key(tmp_path):
    bus = tmp_path / "bus"
    settings = Settings(
        engines=(ENGINE,), reuse=True, exchange={"url": f"unix:{bus}"}, admin_key="secret", port=0
    )
    with listen("127.0.0.1", 0) as listener, capture_logs() as entries:
        host, port = listener.getsockname()
        running = asyncio.create_task(run._run(settings, [listener], None))
        async with asyncio.timeout(30):
            while not (sockets := list(bus.glob("*.http"))):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert [stat.S_IMODE(path.stat().st_mode) & 0o077 for path in sockets if path.suffix == ".http"] == [
            0
        ]
        over = httpx.AsyncHTTPTransport(uds=str(sockets[0]))
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}/admin/v1", trust_env=False) as client:
            assert (await client.get("/stats")).status_code == 401
        async with httpx.AsyncClient(transport=over, base_url="http://peer") as peer:
            assert (await peer.get("/admin/v1/stats")).json()["totals"]["engines"] == 1
            assert (await peer.post("/admin/v1/engines/a/drain", json={})).status_code == 200
            assert (await peer.get("/v1/models")).json()["data"] == []
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await running == 0
    assert [each.name for each in bus.iterdir()] == ["secret"]
    assert [entry["by"] for entry in entries if entry["event"] == "admin action"] == ["another kvpin"]
