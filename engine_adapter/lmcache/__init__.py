"""LMCache as the host and disk tier of vLLM: asked over HTTP what it holds, and told what to move.

tiers.py     the collaborator of vLLM's adapter    survey.py  what a node and its coordinator are, and lack
client.py    their routes                          wire.py    their answers
chunks.py    what they hold of a prompt            salts.py   what keeps KV apart that LMCache would mix
verbs.py     offload, restore, flush               pins.py    pins that end
"""

from __future__ import annotations

from engine_adapter.lmcache.tiers import LmCache

__all__ = ["LmCache"]
