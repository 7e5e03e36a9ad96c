"""What `kvpin serve` prints on standard output: where it listens, and what to try once it is ready."""

from __future__ import annotations

import asyncio
import json
from importlib.metadata import version

from proxy.fleet.fleet import Fleet

POLL_S = 0.1


class Banner:
    """The lines a person needs to start using kvpin."""

    def __init__(self, fleet: Fleet, host: str, port: int, *, reuse: bool) -> None:
        self._fleet = fleet
        self._reuse = reuse
        # A wildcard address is listened on, not connected to.
        name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
        self._base = f"http://{name}:{port}"

    def print_addresses(self) -> None:
        """Printed at once: the addresses."""
        mode = "on" if self._reuse else "off (ENABLE_KV_CACHE_REUSE=1 turns it on)"
        _print(f"kvpin {version('kvpin')}, KV cache reuse {mode}")
        _print(f"  base_url  {self._base}/v1")
        _print(f"  admin     {self._base}/admin/v1")
        _print("starting engines …")

    async def print_when_ready(self) -> None:
        """Printed once: the models that are served, and a request to copy."""
        while not self._fleet.is_ready():  # noqa: ASYNC110 - a person waits for this, not a machine
            await asyncio.sleep(POLL_S)
        for pool in self._fleet.pools.values():
            _print(f"ready: {pool.model} on {', '.join(pool.engines)}")
        model = next(iter(self._fleet.pools))
        body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}
        _print("try it:")
        _print(f"  curl {self._base}/v1/chat/completions \\")
        _print("    -H 'content-type: application/json' \\")
        _print(f"    -d '{json.dumps(body)}'")


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - this module's purpose
