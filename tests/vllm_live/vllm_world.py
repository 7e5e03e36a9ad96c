"""Real vLLMs with a kvpin in front, for live tests and benchmarks.

vllm_world(tmp_path, servers=2)  →  clients → kvpin → vLLMs on a CPU, each with its own cache and events
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from scripts.make_checkpoint import RANK, checkpoint_path
from tests.live.server_world import (
    MODEL,
    RunningServer,
    ServerWorld,
    free_port,
    installed,
    running_server,
    server_world,
)

LORA = "ada"
BLOCK = 32  # tokens; attention on a CPU takes multiples of 32
# Below the ephemeral ports, so that none is taken while an engine starts or restarts.
HTTP_PORTS = range(8200, 8300)
EVENT_PORTS = range(5800, 5998, 2)


@functools.cache
def vllm() -> str:
    """Path of the command, which is installed on first use."""
    return installed("vllm")


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How a vLLM is started.

    Attributes:
        blocks: cache size in blocks of 32 tokens; vLLM keeps one of them.
        context: `--max-model-len`, in tokens; a request of that length must fit into the blocks.
        buffer_steps: event batches in its replay buffer.
        model: directory of another model, without a LoRA adapter.
        flags: more flags, which override the others.
        environment: more environment variables.
    """

    blocks: int = 100
    context: int = 1024
    buffer_steps: int = 10_000
    model: Path | None = None
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def running_vllm(
    log: Path, options: VllmOptions | None = None, *, port: int = 0, event_port: int = 0
) -> AbstractContextManager[RunningServer]:
    """Starts a vLLM, yields it at once, and ends it. Without ports it takes free ones."""
    options = options or VllmOptions()
    port = port or free_port(HTTP_PORTS)
    event_port = event_port or free_port(EVENT_PORTS)
    command = (vllm(), *_arguments(options, port, event_port))
    environment = {**_ENVIRONMENT, **options.environment}
    return running_server(log, command, environment, port=port, event_port=event_port)


_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def _arguments(options: VllmOptions, port: int, event_port: int) -> list[str]:
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{event_port}",
        "replay_endpoint": f"tcp://*:{event_port + 1}",
        "buffer_steps": options.buffer_steps,
        "topic": f"kv@{MODEL}",
    }
    model = options.model or checkpoint_path("model")
    lora = f"--enable-lora --max-lora-rank {RANK} --lora-modules {LORA}={checkpoint_path('lora')}".split()
    return [
        *("serve", str(model), "--served-model-name", MODEL, "--dtype", "float32"),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-num-seqs", "8"),
        *("--max-model-len", str(options.context), "--num-gpu-blocks-override", str(options.blocks)),
        *("--block-size", str(BLOCK), "--enable-prefix-caching", "--enable-prompt-tokens-details"),
        *(() if options.model else lora),
        *("--kv-events-config", json.dumps(events)),
        *options.flags,
    ]


def vllm_world(
    tmp_path: Path,
    options: VllmOptions | None = None,
    *,
    servers: int = 1,
    options_of: Callable[[RunningServer], str] | None = None,
    kvpin_flags: tuple[str, ...] = (),
) -> AbstractContextManager[ServerWorld]:
    """vLLMs, all started with `options`, and a kvpin in front of them; see `server_world`."""

    def start(log: Path, port: int, event_port: int) -> AbstractContextManager[RunningServer]:
        return running_vllm(log, options, port=port, event_port=event_port)

    return server_world(
        tmp_path, "vllm", start, servers=servers, options_of=options_of, kvpin_flags=kvpin_flags
    )
