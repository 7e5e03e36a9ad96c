"""The NixlConnector of a fake vLLM: keeps a prompt's blocks under a lease, and pulls those of others.

Nothing is moved: a pull says what the real one would have found. After the end of the lease, it finds the
blocks of somebody else, and no error.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar


class Found(Enum):
    """What a pull finds."""

    THE_KV = "the prompt's"
    OTHER_KV = "somebody else's, because the lease is over"
    NOTHING = "the prefill engine is gone: the prompt is computed"


@dataclass(slots=True, eq=False)
class FakeNixl:
    """The connector of one engine.

    Attributes:
        lease_s: how long it keeps blocks.
        port: its side channel.
        kept: request → when its lease ends.
        found: what its own pulls found.
        fetched: prompt tokens whose KV they read.
        left: clients that left before their first leg was over.
        aborted: first legs that ended after that, and kept nothing.
    """

    reached: ClassVar[dict[str, FakeNixl]] = {}

    lease_s: float = 30.0
    port: int = 5600
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    kept: dict[str, float] = field(default_factory=dict)
    found: list[Found] = field(default_factory=list)
    fetched: int = 0
    left: int = 0
    aborted: int = 0

    def open(self) -> None:
        """Others reach it."""
        self.reached[self.id] = self

    def close(self) -> None:
        """Nobody reaches it any more."""
        self.reached.pop(self.id, None)

    @property
    def held(self) -> list[str]:
        """Requests whose lease has not ended."""
        return [name for name, ends in self.kept.copy().items() if ends > time.monotonic()]

    def keep(self, request_id: str, tokens: int, cached: int, block_size: int) -> dict:
        """Keeps the blocks of a prompt; returns the `kv_transfer_params` of the answer."""
        request_id = f"cmpl-{request_id}-0-{uuid.uuid4().hex[:8]}"
        self.kept[request_id] = time.monotonic() + self.lease_s
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, -(-tokens // block_size) + 1))],
            "remote_engine_id": self.id,
            "remote_request_id": request_id,
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": cached,
        }

    def give(self, request_id: str) -> Found:
        """What another engine finds in the blocks of that request, which are free from then on."""
        ends = self.kept.pop(request_id, 0.0)
        return Found.THE_KV if time.monotonic() < ends else Found.OTHER_KV

    async def pull(self, params: dict, tokens: int) -> Found:
        """Reads the blocks of that many tokens that another engine keeps."""
        found = await self._ask(params, tokens)
        if found is not Found.NOTHING:
            self.fetched += tokens
        self.found.append(found)
        return found

    async def _ask(self, params: dict, _tokens: int) -> Found:
        source = self.reached.get(params["remote_engine_id"])
        return Found.NOTHING if source is None else source.give(params["remote_request_id"])
