"""A real LMCache below real vLLMs: one shared node and its coordinator.

lmcache_world(tmp_path)  →  clients → kvpin → vLLMs → LMCache's node, in memory and in files
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.make_checkpoint import checkpoint_path
from tests.live.answers import until
from tests.live.server_world import ROOT, STOP_S, ServerWorld, free_port
from tests.vllm_live.vllm_world import VllmOptions, vllm, vllm_world

CHUNK = 64
FLUSH_S = 0.25
PORTS = range(6300, 6398, 2)
_HEALTH = {"node": "healthcheck", "coordinator": "healthz"}


@functools.cache
def overlay() -> str:
    """The `PYTHONPATH` for LMCache, which is installed on first use."""
    if given := os.environ.get("LMCACHE"):
        return given
    command = [ROOT / "scripts" / "vllm", "lmcache"]
    install = subprocess.run(command, capture_output=True, text=True, check=False)
    if install.returncode:
        pytest.fail(f"scripts/vllm lmcache ended with {install.returncode}:\n{install.stderr}", pytrace=False)
    return install.stdout.strip()


@dataclass(slots=True)
class LmCacheWorld:
    """vLLMs over one LMCache, and kvpin in front of them.

    Attributes:
        url: the node's HTTP API.
        coordinator_url: the coordinator's.
    """

    url: str
    coordinator_url: str
    tmp_path: Path = field(repr=False)
    vllms: ServerWorld = field(init=False)
    _ports: dict[str, int] = field(repr=False)
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict, repr=False)

    def start(self, what: str) -> None:
        """Starts the `node` or the `coordinator`, and waits for it."""
        flags = self._flags(what)
        command = [str(Path(vllm()).parent / "python"), "-m", "lmcache.cli.main", *flags]
        with (self.tmp_path / f"{what}.log").open("ab") as output:
            environment = {**os.environ, **_environment()}
            self._running[what] = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        url = self.url if what == "node" else self.coordinator_url
        until(lambda: _is_well(f"{url}/{_HEALTH[what]}"), f"the {what}", lambda: self.log(what))

    def kill(self, what: str) -> None:
        """Ends it as `kill -9` does."""
        process = self._running.pop(what)
        process.kill()
        process.wait(STOP_S)

    def stop(self) -> None:
        """Ends both."""
        for what in list(self._running):
            self.kill(what)

    def log(self, what: str) -> str:
        """Its log."""
        path = self.tmp_path / f"{what}.log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def tiers(
        self, token_ids: Sequence[int], salt: str = "", client: httpx.Client | None = None
    ) -> list[str]:
        """The places of a prompt's chunks, as the coordinator reports them."""
        post = client.post if client is not None else functools.partial(httpx.post, trust_env=False)
        body = {"token_ids": list(token_ids), "model_name": str(checkpoint_path("model")), "world_size": 1}
        answer = post(f"{self.coordinator_url}/directory/lookup", json=body | {"cache_salt": salt})
        placements = [each["placements"] for each in answer.raise_for_status().json()["results"]]
        return ["+".join(sorted(place["tier"] for place in places)) for places in placements]

    def until_tiers(self, token_ids: Sequence[int], expected: str, salt: str = "") -> None:
        """Waits until the coordinator reports every whole chunk of a prompt there."""
        whole = [expected] * (len(token_ids) // CHUNK)
        until(lambda: self.tiers(token_ids, salt) == whole, f"a prompt on {expected!r}")

    def reset_vllms(self) -> None:
        """Empties vLLM's own caches behind kvpin's back. kvpin hears of it with the next request."""
        for number, server in enumerate(self.vllms.servers):
            answer = httpx.post(f"{server.url}/reset_prefix_cache", trust_env=False)
            assert answer.raise_for_status().json() == {"success": True}
            nudge = {"model": "tiny", "prompt": [5], "max_tokens": 1}
            httpx.post(f"{server.url}/v1/completions", json=nudge, trust_env=False).raise_for_status()
            self.vllms.until(
                lambda number=number: self.vllms.engine(number)["blocks"]["gpu"] == 0, "a cleared view"
            )

    def _flags(self, what: str) -> list[str]:
        if what == "coordinator":
            port = self._ports["coordinator"]
            return f"coordinator --host 127.0.0.1 --port {port} --chunk-size {CHUNK}".split()
        l2 = self.tmp_path / "l2"
        l2.mkdir(exist_ok=True)
        flags = (
            f"server --instance-id node-a --host 127.0.0.1 --port {self._ports['zmq']} "
            f"--http-host 127.0.0.1 --http-port {self._ports['http']} --l1-size-gb 1 --chunk-size {CHUNK} "
            f"--eviction-policy LRU --supported-transfer-mode auto --disable-metrics "
            f"--coordinator-url {self.coordinator_url} --coordinator-advertise-ip 127.0.0.1 "
            f"--coordinator-event-reporting --coordinator-event-flush-interval {FLUSH_S}"
        )
        return [*flags.split(), "--l2-adapter", json.dumps({"type": "fs", "base_path": str(l2)})]


@contextmanager
def lmcache_world(tmp_path: Path, *, servers: int = 1, blocks: int = 100) -> Iterator[LmCacheWorld]:
    """Starts everything and ends it. `blocks` is the size of each vLLM's own cache."""
    with ExitStack() as stack:
        ports = {name: free_port(PORTS) for name in ("coordinator", "http")}
        ports["zmq"] = ports["http"] + 1
        world = LmCacheWorld(
            f"http://127.0.0.1:{ports['http']}", f"http://127.0.0.1:{ports['coordinator']}", tmp_path, ports
        )
        stack.callback(world.stop)
        world.start("coordinator")
        world.start("node")
        connector: dict[str, Any] = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
        connector["kv_connector_extra_config"] = {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": ports["zmq"],
            "lmcache.mp.heartbeat_interval": 1.0,
            "lmcache.mp.mq_timeout": 5.0,
        }
        flags = ("--kv-transfer-config", json.dumps(connector))
        options = VllmOptions(blocks=blocks, flags=flags, environment=_environment())
        world.vllms = stack.enter_context(
            vllm_world(
                tmp_path,
                options,
                servers=servers,
                options_of=lambda _server: f"lmcache={world.url}",
                kvpin_flags=("--log-format=json",),
            )
        )
        yield world


def _environment() -> dict[str, str]:
    """The environment of processes that import LMCache."""
    return {"PYTHONPATH": overlay(), "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}


def _is_well(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
