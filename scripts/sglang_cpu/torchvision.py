"""Stands in for torchvision, whose PyPI build does not load beside torch's build for CPUs. SGLang imports it
also for models of text, which use nothing of it."""

from __future__ import annotations

import importlib.machinery
import sys
import types

__version__ = "0.28.0"
__path__: list[str] = []


class _Name(type):
    """A class whose attributes are their own names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(types.ModuleType):
    """A module that has any class, and any submodule, which can also be called."""

    __path__: list[str] = []  # noqa: RUF012 - as of modules

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {}) if name[0].isupper() else _module(f"{self.__name__}.{name}")

    def __call__(self, *_args: object, **_kwargs: object) -> None:
        return None


def _module(full: str) -> _Module:
    module = _Module(full)
    module.__spec__ = importlib.machinery.ModuleSpec(full, None, is_package=True)
    sys.modules[full] = module
    return module


transforms, io, ops = (_module(f"torchvision.{name}") for name in ("transforms", "io", "ops"))
for _name in ("transforms.functional", "transforms.v2", "transforms.v2.functional", "models"):
    _module(f"torchvision.{_name}")
