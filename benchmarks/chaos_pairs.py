"""Pairs in `chaos.py`: half of the mocks compute prompts for the others, which pull their KV.

A mock that pulls KV whose lease is over answers from another prompt, with status 200: that answer is wrong.
The leases are short, so that a stopped engine outlives many of them.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
from chaos_engines import Engine, mock_engine
from chaos_relay import HOST

LEASE_S = 8.0
"""kvpin uses this less five seconds."""
# Those that answer compute prompts so slowly, in tokens a second, that a pair is worth its transfer.
_SLOW = 800
_TRANSFERS = re.compile(r'^kvpin_transfers_total{.*result="(\w+)".*} (\S+)$', re.MULTILINE)


def pair_engines(count: int, dice: random.Random) -> list[Engine]:
    """So many mocks, every other one for prefills."""
    flags = ("--lease-s", str(LEASE_S))
    return [
        mock_engine(number, dice, flags, {"role": "prefill", "kv_lease_s": LEASE_S})
        if number % 2
        else mock_engine(
            number,
            dice,
            (*flags, "--prefill-rate", str(_SLOW)),
            {"role": "decode", "kv_lease_s": LEASE_S},
        )
        for number in range(count)
    ]


@dataclass(slots=True)
class Transfers:
    """The transfers of a run.

    Attributes:
        results: their number by result, as kvpin counts them.
        fetched: leases that ended because another engine pulled the KV.
        unfetched: the beginning of each lease that ran out.
        held: leases that still run.
        found: what the engines' pulls found.
    """

    results: Counter[str] = field(default_factory=Counter)
    fetched: int = 0
    unfetched: list[float] = field(default_factory=list)
    held: int = 0
    found: Counter[str] = field(default_factory=Counter)

    def after(self, moment: float) -> int:
        """Leases that began after that moment and ran out."""
        return sum(began > moment for began in self.unfetched)


def results_of(page: str) -> Counter[str]:
    """The number of transfers by result, from kvpin's metrics."""
    results = Counter[str]()
    for result, count in _TRANSFERS.findall(page):
        results[result] += round(float(count))
    return results


async def transfers_of(url: str, engines: Sequence[Engine]) -> Transfers:
    """Waits until each lease may have run out; returns the transfers."""
    await asyncio.sleep(LEASE_S)
    seen = Transfers()
    async with httpx.AsyncClient(timeout=30) as client:
        seen.results = results_of((await client.get(f"{url}/metrics")).text)
        for engine in engines:
            told = (await client.get(f"http://{HOST}:{engine.port}/mock/nixl")).json()
            seen.fetched += told["fetched"]
            seen.unfetched += told["unfetched"]
            seen.held += told["held"]
            seen.found.update(told["found"])
    return seen
