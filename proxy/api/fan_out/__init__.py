"""Requests for several answers (`n` choices, several prompts): split, served one by one, and joined.

split.py        which requests a pool needs split, and the single requests
join.py         their answers, joined into the client's one answer: also those of routes with lists
serve_parts.py  serves the parts side by side

The flow serves each single request like any other: it renders, places and audits it, and keeps a record. An
engine that runs several choices well gets them in one request: `EngineInfo` says so.
"""

from __future__ import annotations

from proxy.api.fan_out.serve_parts import serve
