"""Real llama-servers with a kvpin in front, for live tests.

llama_world(tmp_path, servers=2)  →  clients → kvpin → llama-servers that share one host_cache_dir
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.live.answers import until
from tests.live.conftest import Kvpin, running_kvpin
from tests.llama import RunningLlama, memory_dir, running_llama_server

MODEL = "tiny"
WAIT_S = 60.0
# Flags with which the tiny model has tokens to fill in with.
FIM = [f"tokenizer.ggml.fim_{part}_token_id=int:{10 + at}" for at, part in enumerate(("pre", "suf", "mid"))]
FILLS_IN = tuple(word for each in FIM for word in ("--override-kv", each))


@dataclass(slots=True)
class LlamaWorld:
    """llama-servers and the kvpin in front of them. The engine of server n is called `llama-n`.

    Attributes:
        kvpin: the running proxy; another one after `restart_kvpin`.
        servers: the running servers; another one at its place after `restart`.
        host_dir: where all servers save, None without host_cache.
    """

    kvpin: Kvpin
    servers: list[RunningLlama]
    host_dir: Path | None
    _start_server: Callable[[int, int], RunningLlama] = field(repr=False)
    _start_kvpin: Callable[[], Kvpin] = field(repr=False)
    _stop_kvpin: Callable[[], None] = field(repr=False)

    @property
    def base_url(self) -> str:
        return self.kvpin.base_url

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        """A data-plane request, e.g. to `chat/completions`."""
        url = f"{self.base_url}/{path}"
        return httpx.post(url, json={"model": MODEL, **body}, timeout=WAIT_S, trust_env=False, **options)

    def chat(self, text: str | list[dict[str, Any]], **fields: Any) -> httpx.Response:
        """A greedy chat request that was answered with 200; `text` is one user message or all messages."""
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        body = {"messages": messages, "max_tokens": 8, "temperature": 0, **fields}
        return self.post("chat/completions", body).raise_for_status()

    def admin(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        """An operation of the admin API that is done, e.g. `admin("flush", {"all": True})`."""
        operation = self.kvpin.admin("POST", verb, json=body).raise_for_status().json()
        assert operation["state"] == "done", operation
        return operation

    def engine(self, number: int = 0) -> dict[str, Any]:
        return self.kvpin.engines()[f"llama-{number}"]

    def kv(self, number: int = 0) -> dict[str, Any]:
        """What the adapter of a server tells: slots, counts, files, …"""
        return self.engine(number)["kv"]

    def slots(self, number: int = 0) -> list[dict[str, Any]]:
        return self.kv(number)["slots"]

    def server_slots(self, number: int = 0) -> list[dict[str, Any]]:
        """The slots of a server as it tells itself."""
        return httpx.get(f"{self.servers[number].url}/slots", timeout=WAIT_S, trust_env=False).json()

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        return until(holds, what, self.kvpin.log.read_text)

    def record_of(self, answer: httpx.Response) -> dict[str, Any]:
        """The record of a request, which is kept once its slot is free."""
        return self.kvpin.record_of(answer)

    def until_idle(self, number: int = 0) -> list[dict[str, Any]]:
        """The slots of a server as kvpin sees them, once nothing runs on any."""

        def idle() -> list[dict[str, Any]] | None:
            slots = self.slots(number)
            return slots if all(slot["operation"] is None for slot in slots) else None

        return self.until(idle, "an idle server")

    def until_ready(self, number: int = 0, state: str = "ready") -> None:
        """Waits until kvpin says that an engine is `ready`, `down`, … One just ended may be ready yet."""
        self.until(lambda: self.engine(number)["state"] == state, f"engine {number} {state}")

    def until_known(self, number: int = 0) -> None:
        """Waits until kvpin has found out that a server was restarted, and serves by it."""

        def is_known() -> bool:
            engine = self.kvpin.engines().get(f"llama-{number}", {"state": "unconnected"})
            return engine["state"] == "ready" and not any(slot["tokens"] for slot in engine["kv"]["slots"])

        self.until(is_known, f"engine {number} after its restart")

    def restart(self, number: int = 0) -> None:
        """Ends a server as a crash would, and starts another on the same port. Kvpin finds out by itself."""
        old = self.servers[number]
        old.kill()
        self.servers[number] = self._start_server(number, old.port)

    def restart_kvpin(self) -> None:
        """Stops kvpin as an operator would, and starts another with the same options."""
        self._stop_kvpin()
        self.kvpin = self._start_kvpin()


@contextmanager
def llama_world(
    tmp_path: Path,
    *server_flags: str,
    servers: int = 1,
    slots: int = 4,
    ctx: int = 4096,
    model: Path | None = None,
    host_cache: bool = True,
    engine_options: str = "",
    kvpin_flags: tuple[str, ...] = (),
    models: tuple[str, ...] = (),
    server_env: Mapping[str, str] | None = None,
) -> Iterator[LlamaWorld]:
    """Starts servers and a kvpin with reuse that knows them; ends all of them, kvpin with a clean exit.

    `ctx` is that of one slot, in tokens; `host_cache`: the servers share a directory in memory that kvpin
    knows, too; `engine_options` are of each `--engine`, e.g. `host_cache_bytes=8MiB`; `models` are the names
    of the servers' models, if they differ.
    """
    with ExitStack() as stack, ExitStack() as proxies:
        host_dir = stack.enter_context(memory_dir()) if host_cache else None
        starts = 0

        def log(name: str) -> Path:
            nonlocal starts
            starts += 1
            return tmp_path / f"{name}-{starts}.log"

        def start_server(number: int, port: int) -> RunningLlama:
            return stack.enter_context(
                running_llama_server(
                    log(f"llama-{number}"), model, *server_flags, slots=slots, ctx=ctx, save_dir=host_dir,
                    port=port, env=server_env,
                )
            )  # fmt: skip

        running = [start_server(number, 0) for number in range(servers)]
        options = [f"host_cache_dir={host_dir}"] if host_dir else []
        options += [engine_options] if engine_options else []
        engines = [
            f"--engine=llama_server={server.url},id=llama-{number},{','.join([f'model={name}', *options])}"
            for number, (server, name) in enumerate(zip(running, models or [MODEL] * servers, strict=True))
        ]

        def start_kvpin() -> Kvpin:
            return proxies.enter_context(running_kvpin(log("kvpin"), *engines, *kvpin_flags))

        world = LlamaWorld(start_kvpin(), running, host_dir, start_server, start_kvpin, proxies.close)
        for number in range(servers):
            world.until_ready(number)
        yield world
