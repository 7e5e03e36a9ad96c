"""The NixlConnector of a mock engine, which reaches those of other processes.

A pull asks the other engine by HTTP, as the real one asks by its side channel. Then it takes the time of a
transfer. A pull finds nothing if the other engine is gone or has restarted, and if it does not answer within
`GIVE_UP_S`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field

import httpx
from harness import ROOT

sys.path.insert(0, str(ROOT))
from tests.fake_engines.nixl import FakeNixl, Found

GIVE_UP_S = 5.0


@dataclass(slots=True, eq=False)
class MockNixl(FakeNixl):
    """The connector of one engine. Its side channel is the engine's own HTTP port.

    Attributes:
        transfer_rate: tokens a second that it pulls.
        begun: request → when its lease began.
        fetched_requests: leases that another engine ended by its pull.
    """

    transfer_rate: float = 80_000.0
    begun: dict[str, float] = field(default_factory=dict)
    fetched_requests: int = 0

    def keep(self, request_id: str, tokens: int, cached: int, block_size: int) -> dict:
        """See `FakeNixl.keep`."""
        params = FakeNixl.keep(self, request_id, tokens, cached, block_size)
        self.begun[params["remote_request_id"]] = time.monotonic()
        return params

    def give(self, request_id: str) -> Found:
        """See `FakeNixl.give`."""
        found = FakeNixl.give(self, request_id)
        self.fetched_requests += found is Found.THE_KV
        return found

    @property
    def told(self) -> dict[str, object]:
        """Leases: how many run now, how many were fetched, and when each began that ended unfetched."""
        now = time.monotonic()
        ended = [self.begun[name] for name, ends in self.kept.items() if ends <= now]
        return {
            "held": len(self.held),
            "fetched": self.fetched_requests,
            "unfetched": ended,
            "found": {each.name: self.found.count(each) for each in Found},
        }

    async def _ask(self, params: dict, tokens: int) -> Found:
        url = f"http://{params['remote_host']}:{params['remote_port']}/mock/nixl"
        asked = {"engine": params["remote_engine_id"], "request": params["remote_request_id"]}
        try:
            async with httpx.AsyncClient(timeout=GIVE_UP_S, trust_env=False) as client:
                answer = await client.post(url, json=asked)
        except httpx.TransportError:
            return Found.NOTHING
        if not answer.is_success:
            return Found.NOTHING
        await asyncio.sleep(tokens / self.transfer_rate)
        return Found[answer.json()]
