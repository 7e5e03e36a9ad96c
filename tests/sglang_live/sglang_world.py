"""Real SGLangs with a kvpin in front, for live tests.

sglang_world(tmp_path, options)  →  clients → kvpin → an SGLang on a CPU, with one or several ranks
"""

from __future__ import annotations

import functools
import json
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from scripts.make_checkpoint import checkpoint_path
from tests.live.server_world import (
    MODEL,
    RunningServer,
    ServerWorld,
    free_port,
    installed,
    running_server,
    server_world,
)

# Below the ephemeral ports, so that none is taken while an engine starts or restarts.
HTTP_PORTS = range(8300, 8400)
EVENT_PORTS = range(6000, 6098, 2)
REPLAY = 100
"""The replay port, above that of the events."""


@functools.cache
def sglang() -> str:
    """Path of a Python that has it, which is installed on first use."""
    return installed("sglang")


@dataclass(frozen=True, slots=True)
class SglangOptions:
    """How an SGLang is started.

    Attributes:
        page: tokens of a page.
        tokens: size of each rank's cache.
        ranks: data-parallel ranks.
        running: requests that each rank runs at once.
        model: directory of another model.
        flags: more flags, which override the others.
        environment: more environment variables.
    """

    page: int = 16
    tokens: int = 4096
    ranks: int = 1
    running: int = 8
    model: Path | None = None
    flags: tuple[str, ...] = ("--enable-cache-report",)
    environment: dict[str, str] = field(default_factory=dict)


def running_sglang(
    log: Path, options: SglangOptions | None = None, *, port: int = 0, event_port: int = 0
) -> AbstractContextManager[RunningServer]:
    """Starts an SGLang, yields it at once, and ends it. Without ports it takes free ones."""
    options = options or SglangOptions()
    port = port or free_port(HTTP_PORTS)
    event_port = event_port or free_port(EVENT_PORTS)
    command = (sglang(), "-m", "sglang.launch_server", *_arguments(options, port, event_port))
    # A list of cores for each rank, or nothing to bind to.
    binds = "|".join(map(str, range(options.ranks))) if options.ranks > 1 else "0"
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": binds, **options.environment}
    return running_server(log, command, environment, port=port, event_port=event_port, ready="/ready")


def _arguments(options: SglangOptions, port: int, event_port: int) -> list[str]:
    events = {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{event_port}",
        "replay_endpoint": f"tcp://*:{event_port + REPLAY}",
    }
    return [
        *("--model-path", str(options.model or checkpoint_path("model")), "--served-model-name", MODEL),
        *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
        *("--host", "127.0.0.1", "--port", str(port), "--dp-size", str(options.ranks)),
        *("--disable-cuda-graph", "--skip-server-warmup", "--disable-overlap-schedule", "--sleep-on-idle"),
        *("--page-size", str(options.page), "--max-total-tokens", str(options.tokens)),
        *("--max-running-requests", str(options.running * options.ranks)),
        *("--kv-events-config", json.dumps(events)),
        *options.flags,
    ]


def sglang_world(
    tmp_path: Path, options: SglangOptions | None = None, *, kvpin_flags: tuple[str, ...] = ()
) -> AbstractContextManager[ServerWorld]:
    """An SGLang and a kvpin in front of it; see `server_world`."""
    options = options or SglangOptions()

    def start(log: Path, port: int, event_port: int) -> AbstractContextManager[RunningServer]:
        return running_sglang(log, options, port=port, event_port=event_port)

    return server_world(tmp_path, "sglang", start, ranks=options.ranks, kvpin_flags=kvpin_flags)
