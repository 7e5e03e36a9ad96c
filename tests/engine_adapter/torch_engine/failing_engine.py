"""`kvpin engine` whose model fails on prompts that begin with one of these tokens. It ends after a second."""

from __future__ import annotations

import atexit
import os

import torch

from engine_adapter.torch_engine import server
from engine_adapter.torch_engine.model import Runner
from engine_adapter.torch_engine.serve import app

FAILS, BREAKS_THE_DEVICE, FAILS_LATER = 1001, 1002, 1003
_run = Runner.run


def _failing_run(runner, work):
    for item in work:
        first = item.tokens[0]
        if first == FAILS or (first == FAILS_LATER and item.computed > 40):
            raise RuntimeError("index out of range in self")
        if first == BREAKS_THE_DEVICE:
            atexit.register(os.abort)  # so does torch, where it cannot free memory of the device
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
    return _run(runner, work)


if __name__ == "__main__":
    Runner.run = _failing_run
    server._GRACE_S = 1
    app()
