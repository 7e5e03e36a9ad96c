"""Stands in for `llama-server` in llama.cpp's own tests: kvpin before a real one, or the real one alone.

    python scripts/llama_cpp_server.py ready SOCKET       keeps kvpin imported, and forks one for each server
    python scripts/llama_cpp_server.py serve FLAG…        llama-server's flags; this is what the tests start

Environment of `serve`:
    LLAMA_CPP_SERVER     the real binary
    LLAMA_CPP_MODEL      a GGUF that stands for every model of the Hugging Face hub
    LLAMA_CPP_KVPIN      the socket of `ready`; without it the real server runs alone
    LLAMA_CPP_PINNED     1 lets kvpin manage the server's slots, whatever the test's flags are
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

# Those of the hub that the tests of a router name.
_ROUTED = (
    "ggml-org/tinygemma3-GGUF:Q8_0",
    "ggml-org/test-model-stories260K:F32",
    "ggml-org/test-model-stories260K-infill:F32",
)
_OF_THE_HUB = ("--hf-repo", "--hf-file", "--model-url", "--mmproj-url")
_PINNED = ("--slots", "--cache-ram", "0")
_POLL_S = 0.02
_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")


def serve(flags: list[str]) -> int:
    """Runs a server until it ends or a signal ends it. Returns its exit status."""
    flags = _with_local_model(flags)
    if "LLAMA_CPP_KVPIN" not in os.environ:
        command = [*_WITH_PARENT, os.environ["LLAMA_CPP_SERVER"], *flags]
        os.execvp(command[0], command)  # noqa: S606 - the tests' own server
    host, port = _taken(flags, "--host", "127.0.0.1"), _taken(flags, "--port", "8080")
    key = flags[flags.index("--api-key") + 1] if "--api-key" in flags else None
    if os.environ.get("LLAMA_CPP_PINNED"):
        flags = [*(flag for flag in flags if flag != "--no-slots"), *_PINNED]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        behind = free.getsockname()[1]
    engine = f"llama_server=http://127.0.0.1:{behind}" + (f",api_key={key}" if key else "")
    kvpin = ["serve", "--host", host, "--port", port, "--reuse", "--engine", engine, "--log-level", "warning"]
    server = subprocess.Popen(
        [*_WITH_PARENT, os.environ["LLAMA_CPP_SERVER"], *flags, "--host", "127.0.0.1", "--port", str(behind)]
    )
    with socket.socket(socket.AF_UNIX) as ready:
        ready.connect(os.environ["LLAMA_CPP_KVPIN"])
        ready.sendall(json.dumps([*kvpin, *(("--api-key", key) if key else ())]).encode())
        signal.signal(signal.SIGTERM, lambda *_: server.terminate())
        ready.settimeout(_POLL_S)
        while server.poll() is None:
            with suppress(TimeoutError):
                if not ready.recv(1):  # kvpin has ended
                    server.terminate()
                    return server.wait() or 1
    return server.returncode


def ready(path: str) -> None:
    """Forks a kvpin for each connection, which sends its arguments. It ends with the connection."""
    from proxy.cli.main import main  # noqa: PLC0415 - `serve` starts quickly without it
    from proxy.server.run import serve as _  # noqa: PLC0415 - imported before the forks

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        by_port: dict[str, int] = {}
        while True:
            connection, _ = listening.accept()
            arguments = json.loads(connection.recv(1 << 16))
            port = arguments[arguments.index("--port") + 1]
            if port in by_port:
                with suppress(ChildProcessError):  # it has ended
                    os.waitpid(by_port[port], 0)
            by_port[port] = os.fork()
            if by_port[port] == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                threading.Thread(target=_ends_with, args=(connection,), daemon=True).start()
                sys.argv = ["kvpin", *arguments]
                main()
            connection.close()


def _ends_with(connection: socket.socket) -> None:
    connection.recv(1)
    os._exit(0)


def _with_local_model(flags: list[str]) -> list[str]:
    """The flags with the local model in place of one of the hub's."""
    kept = [flag for flag in flags if flag != "--offline"]
    is_of_the_hub = False
    for name in _OF_THE_HUB:
        is_of_the_hub |= _taken(kept, name, "") != ""
    if not is_of_the_hub and "--model" not in kept and "--models-preset" not in kept:
        return [*kept, "--models-preset", _presets()]
    if not is_of_the_hub:
        return kept
    pooling = ["--pooling", "mean"] if "--embedding" in kept and "--pooling" not in kept else []
    return [*kept, "--model", os.environ["LLAMA_CPP_MODEL"], *pooling, "--threads", "1"]


def _presets() -> str:
    """A file of models for a router, all of which are the local one."""
    path = Path(os.environ["LLAMA_CACHE"], "presets.ini")
    path.parent.mkdir(parents=True, exist_ok=True)
    model = os.environ["LLAMA_CPP_MODEL"]
    path.write_text("".join(f"[{name}]\nmodel = {model}\nthreads = 1\n\n" for name in _ROUTED))
    return str(path)


def _taken(flags: list[str], name: str, default: str) -> str:
    """The value of a flag, which is removed."""
    if name not in flags:
        return default
    at = flags.index(name)
    value = flags[at + 1]
    del flags[at : at + 2]
    return value


if __name__ == "__main__":
    if sys.argv[1] == "ready":
        ready(str(Path(sys.argv[2])))
    else:
        sys.exit(serve(sys.argv[2:]))
