"""Sockets of kvpin's own, and sockets that a service manager hands on."""

import asyncio
import contextlib
import os
import socket

import pytest

from proxy.http.listeners import Door, inherited, listen, listen_on, plainly
from proxy.settings import SettingsError
from tests.kv_world import until


def test_several_addresses_have_one_port_or_none_is_bound():
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(each) for each in listen_on(["127.0.0.1", "127.0.0.2"], 0))
        assert [each.getsockname()[0] for each in (first, second)] == ["127.0.0.1", "127.0.0.2"]
        port = first.getsockname()[1]
        assert second.getsockname()[1] == port
        first.close()
        with pytest.raises(OSError, match="in use"):
            listen_on(["127.0.0.1", "127.0.0.2"], port)
        listen("127.0.0.1", port).close()


@pytest.fixture
def third(monkeypatch):
    """Hands a descriptor on, as if it were number 3."""

    def hand_on(listener):
        monkeypatch.setattr("proxy.http.listeners._FIRST", listener.detach())
        monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
        monkeypatch.setenv("LISTEN_FDS", "1")

    return hand_on


def test_a_socket_that_was_handed_on_is_used_once_and_not_by_children(third):
    own = listen("127.0.0.1", 0)
    address = own.getsockname()
    third(own)
    (listener,) = inherited()
    with listener:
        assert listener.getsockname() == address
        assert not listener.get_inheritable()
    assert not {"LISTEN_PID", "LISTEN_FDS"} & os.environ.keys()
    assert inherited() == []


def test_a_socket_for_another_process_is_left_alone(third, monkeypatch):
    with listen("127.0.0.1", 0) as own:
        third(own.dup())
        monkeypatch.setenv("LISTEN_PID", str(os.getppid()))
        assert inherited() == []


def test_what_is_no_listening_socket_is_one_sentence(third):
    third(socket.socket())
    with pytest.raises(SettingsError, match=r"LISTEN_FDS: descriptor \d+ is no listening TCP socket"):
        inherited()


async def test_a_connection_whose_protocol_fails_is_closed_and_others_come_in():
    made = []

    def connect():
        made.append(1)
        if len(made) == 1:
            raise ValueError("a bug")
        return asyncio.Protocol()

    listener = listen("127.0.0.1", 0)
    door = Door([listener], plainly(connect))
    try:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
        _, writer = await asyncio.open_connection(*listener.getsockname())
        await until(lambda: len(made) == 2)
        writer.close()
    finally:
        door.close()
