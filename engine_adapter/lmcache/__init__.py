"""LMCache as the host and disk tier of vLLM. kvpin asks it over HTTP what it holds and tells it what to move.

tiers.py   what vLLM's adapter uses            survey.py   what a node and its coordinator are
client.py  their routes and answers; chunks of a prompt
verbs.py   offload, restore, flush; pins that expire
salts.py   salts for KV that LMCache would mix options.py  settings
"""

from __future__ import annotations

from engine_adapter.lmcache.tiers import LmCache

__all__ = ["LmCache"]
