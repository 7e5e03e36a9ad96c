"""Which errors end the engine. test_engine.py has the failed steps, over a real model."""

from __future__ import annotations

import pytest
import torch

from engine_adapter.torch_engine.compute import compute, is_fatal


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("index out of range in self"), False),
        (ValueError("CUDA error"), False),
    ],
)
def test_errors_of_the_device_are_fatal(error, fatal):
    assert is_fatal(error) is fatal


def test_no_items_are_no_work():
    class Runner:
        def run(self, work):
            return torch.zeros(len(work), 5)

    assert compute(Runner(), []) == []
