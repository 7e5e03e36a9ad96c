"""LMCache as the host and disk tier of vLLM. kvpin asks it over HTTP what it holds and tells it what to move.

tiers.py     what vLLM's adapter uses          survey.py   what a node and its coordinator are
client.py    their routes                      wire.py     their answers
chunks.py    which chunks of a prompt they hold  salts.py  salts for KV that LMCache would mix
verbs.py     offload, restore, flush           pins.py     pins that expire
options.py   settings
"""

from __future__ import annotations

from engine_adapter.lmcache.tiers import LmCache

__all__ = ["LmCache"]
