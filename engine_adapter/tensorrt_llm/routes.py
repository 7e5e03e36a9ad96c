"""The routes of trtllm-serve beside `/v1`. Its others drain its buffers or change it for all clients."""

from __future__ import annotations

from engine_adapter.routes import READ

ROUTES = {"/version": READ}
