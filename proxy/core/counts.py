"""Sums of counts."""

from __future__ import annotations

from operator import add
from typing import TypeVar

import msgspec

_Counts = TypeVar("_Counts", bound=msgspec.Struct)


def plus(one: _Counts, more: _Counts) -> _Counts:
    """The counts of two structs of one type together, field by field."""
    return type(one)(*map(add, msgspec.structs.astuple(one), msgspec.structs.astuple(more)))
