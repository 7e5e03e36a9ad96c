"""Real sockets in a directory."""

import asyncio
import contextlib
import socket

import pytest
from structlog.testing import capture_logs

from proxy.peers import bus
from proxy.peers.bus import BusCallbacks, UnixBus, prepare
from tests.proxy.peers.world import until


class Member:
    """One that listens, and what it heard."""

    def __init__(self, directory, owner):
        self.heard, self.joined, self.ended = [], 0, []
        self.exchange = UnixBus(directory, owner)
        self.ears = BusCallbacks(self.heard.append, self._join, self.ended.append)

    def _join(self):
        self.joined += 1

    async def __aenter__(self):
        self.task = asyncio.get_running_loop().create_task(self.exchange.run(self.ears))
        await until(lambda: self.exchange.is_connected)
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


async def test_each_hears_all_others_in_order_and_not_itself(tmp_path):
    async with Member(tmp_path / "bus", 1) as one:
        assert one.exchange.is_alone
        one.exchange.publish(b"nobody")
        async with Member(tmp_path / "bus", 2) as two, Member(tmp_path / "bus", 3) as three:
            await until(lambda: one.joined == two.joined == three.joined == 2)
            assert not one.exchange.is_alone
            large = bytes(300_000)
            for frame in (b"first", large, b"last"):
                one.exchange.publish(frame)
            await until(lambda: len(two.heard) == len(three.heard) == 3)
            assert two.heard == three.heard == [b"first", large, b"last"]
            assert one.heard == []
            await one.exchange.aclose()
        await until(lambda: one.exchange.is_alone)
    assert [*(tmp_path / "bus").iterdir()] == []


async def test_what_a_peer_does_not_read_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(bus, "OUTBOX_BYTES", 1000)
    async with Member(tmp_path / "bus", 1) as one, Member(tmp_path / "bus", 2) as two:
        await until(lambda: one.joined)
        one.exchange.publish(bytes(2000))
        one.exchange.publish(b"small")
        await until(lambda: two.heard)
        assert (two.heard, one.exchange.dropped) == ([b"small"], 1)


async def test_the_socket_of_one_that_was_killed_is_removed(tmp_path):
    prepare(tmp_path / "bus")
    dead = tmp_path / "bus" / f"{7:016x}.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as for_http:
        listener.bind(str(dead))
        for_http.bind(str(dead.with_suffix(".http")))
    async with Member(tmp_path / "bus", 1) as one:
        assert one.exchange.is_alone
        assert [path.name for path in (tmp_path / "bus").iterdir()] == [f"{1:016x}.sock"]


async def test_what_is_no_socket_of_a_kvpin_stays_and_is_told_once(tmp_path, monkeypatch):
    monkeypatch.setattr(bus, "_LOOK_S", 0.01)
    prepare(tmp_path / "bus")
    file, folder, foreign = (tmp_path / "bus" / f"{number:016x}.sock" for number in (2, 3, 4))
    file.write_text("mine")
    folder.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams, capture_logs() as logs:
        datagrams.bind(str(foreign))
        async with Member(tmp_path / "bus", 1) as one:
            for _ in range(3):
                one.exchange.is_connected = False
                await until(lambda: one.exchange.is_connected)
            assert one.exchange.is_alone
    assert file.read_text() == "mine"
    assert folder.is_dir()
    assert foreign.is_socket()
    assert [(entry["event"], entry["socket"]) for entry in logs] == [
        ("another kvpin cannot be reached", str(foreign))
    ]


async def test_a_frame_too_long_ends_its_connection(tmp_path, monkeypatch):
    monkeypatch.setattr(bus, "MAX_FRAME_BYTES", 10)
    async with Member(tmp_path / "bus", 1):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "bus" / f"{1:016x}.sock")
        writer.write((11).to_bytes(4, "little"))
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()


def test_a_directory_that_others_may_open_or_too_long_for_a_socket_is_refused(tmp_path):
    (tmp_path / "bus").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="chmod 700"):
        prepare(tmp_path / "bus")
    with pytest.raises(ValueError, match="too long"):
        UnixBus(tmp_path / ("x" * 100), 1)


async def test_the_end_of_a_process_is_seen_at_once_by_all(tmp_path, monkeypatch):
    monkeypatch.setattr(bus, "_LOOK_S", 0.05)
    directory = tmp_path / "bus"
    async with Member(directory, 1) as one, Member(directory, 2) as two:
        path, accepted = directory / f"{10:016x}.sock", []
        server = await asyncio.start_unix_server(lambda _reader, writer: accepted.append(writer), path)
        await until(lambda: len(accepted) == 2)
        server.close()
        for writer in accepted:
            writer.transport.abort()
        await until(lambda: one.ended and two.ended)
        assert one.ended == two.ended == [10]
        assert not path.exists()
        assert one.exchange.is_connected
