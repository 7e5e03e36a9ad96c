"""The sockets that kvpin listens on: its own, or those that a service manager opened and hands on.

A socket that is handed on (systemd's socket activation, sd_listen_fds(3)) outlives the process. Connections
wait in its queue while one kvpin follows another, or two share it during a rolling restart.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence

from proxy.settings import SettingsError

# The first descriptor that a service manager hands on.
_FIRST = 3
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


def inherited() -> list[socket.socket]:
    """The sockets that a service manager gave to this process. Removes the environment variables that name
    them.

    Raises:
        SettingsError: one of them is no listening TCP socket.
    """
    said = {name: os.environ.pop(name, "") for name in _VARIABLES}
    if said["LISTEN_PID"] != str(os.getpid()) or not said["LISTEN_FDS"].isdecimal():
        return []
    return [_handed_on(number) for number in range(_FIRST, _FIRST + int(said["LISTEN_FDS"]))]


def _handed_on(number: int) -> socket.socket:
    try:
        listener = socket.socket(fileno=number)
    except OSError as error:
        raise SettingsError(f"LISTEN_FDS: descriptor {number} is no socket") from error
    is_tcp = listener.family in (socket.AF_INET, socket.AF_INET6) and listener.type == socket.SOCK_STREAM
    if not is_tcp or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.close()
        raise SettingsError(f"LISTEN_FDS: descriptor {number} is no listening TCP socket")
    listener.set_inheritable(False)  # the engines that kvpin starts must not hold it
    return listener


def listen_on(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """A socket for each address, all with the same port; raises OSError."""
    listeners = list[socket.socket]()
    with contextlib.ExitStack() as opened:
        for host in hosts:
            listeners.append(opened.enter_context(listen(host, port)))
            port = listeners[0].getsockname()[1]  # the one that 0 became
        opened.pop_all()
    return listeners


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)
