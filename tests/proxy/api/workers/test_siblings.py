"""Who of several workers speaks for all, and what a kvpin serves to the others of its machine."""

import asyncio
import contextlib
import os
import signal
import socket
import stat

import httpx
import pytest
from structlog.testing import capture_logs

from engine_adapter import HttpTransport
from proxy.api import siblings as siblings_module
from proxy.api.auth import FROM_PEER
from proxy.api.siblings import Siblings, ask
from proxy.http.listeners import listen
from proxy.server import run
from proxy.settings import EngineSettings, Settings
from tests.fakes import serving


@contextlib.asynccontextmanager
async def at_socket(app, path):
    """Serves an application to peers, at a Unix socket."""

    async def to_peer(scope, receive, send):
        await app({**scope, FROM_PEER: True}, receive, send)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        async with serving(to_peer, listener):
            yield


def test_one_speaks_for_all_until_it_is_gone(tmp_path):
    one, two, three = (Siblings(tmp_path, number, 3) for number in (1, 2, 3))
    assert [each.speaks() for each in (two, one, three, two)] == [True, False, False, True]
    assert one.speaker == three.speaker == str(two.own)
    assert two.sockets == [str(one.own), str(three.own)]
    two.retire()
    assert [each.speaks() for each in (two, three, one)] == [False, True, False]
    assert one.speaker == str(three.own)


async def test_one_that_hangs_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(siblings_module, "_SHOW_S", 0.05)
    transport = HttpTransport()
    paths = [str(tmp_path / name) for name in ("1.http", "none.http")]
    with socket.socket(socket.AF_UNIX) as hung:  # takes connections and answers nothing
        hung.bind(paths[0])
        hung.listen()
        assert await ask(transport, paths, "GET", "/metrics") == []
        with pytest.raises(TimeoutError):  # a change may take its time
            await asyncio.wait_for(ask(transport, paths, "POST", "/flush"), 0.2)
    await transport.aclose()


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
        assert [stat.S_IMODE(path.stat().st_mode) & 0o077 for path in sockets] == [0]
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
