"""LMCache as the host and disk tier of vLLM. kvpin asks it over HTTP what it holds and tells it what to move.

tiers.py   what vLLM's adapter uses            survey.py   what a node and its coordinator are
chunks.py  which chunks of a prompt they hold  client.py   their routes and answers
verbs.py   offload, restore, flush             pins.py     pins that expire
salts.py   salts for KV that LMCache would mix options.py  settings
"""

from __future__ import annotations

from engine_adapter.lmcache.tiers import LmCache

__all__ = ["LmCache"]
