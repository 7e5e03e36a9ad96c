"""The routes of the embedded engine beside `/v1`. Those below `/kv` are for kvpin alone."""

from __future__ import annotations

from engine_adapter.routes import ASK

ROUTES = {"/tokenize": ASK, "/detokenize": ASK}
