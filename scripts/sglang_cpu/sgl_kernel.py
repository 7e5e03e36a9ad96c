"""Stands in for SGLang's compiled kernels, of which there is no build for CPUs. It can be imported, and each
kernel raises when it is called: SGLang's CPU engine then takes its plain torch paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.4.10"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a stub")

    return missing
