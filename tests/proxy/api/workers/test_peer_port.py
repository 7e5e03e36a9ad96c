"""What a kvpin serves to the others of its machine."""

import asyncio
import os
import signal
import stat

import httpx
from structlog.testing import capture_logs

from proxy.http.listeners import listen
from proxy.server import run
from proxy.settings import EngineSettings, Settings

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
    assert list(bus.iterdir()) == []
    assert [entry["by"] for entry in entries if entry["event"] == "admin action"] == ["another kvpin"]
