"""Which engines of two kvpins are the same."""

from __future__ import annotations

import re
from collections.abc import Iterable

from proxy.core.peers.messages import ToldEngine

_COUNTED = re.compile(r"[a-z][a-z0-9_-]*-\d+(-dp\d+)?")


def match(told: ToldEngine, own: Iterable[ToldEngine]) -> ToldEngine | None:
    """The own engine that equals a peer's engine; None without one."""
    named = None
    for each in own:
        if each.address == told.address:
            return each
        if each.id == told.id and not (each.is_local or told.is_local or _COUNTED.fullmatch(told.id)):
            named = each
    return named


def hash_alike(told: ToldEngine, own: ToldEngine) -> bool:
    """True if both kvpins make the same block hashes of a prompt for this engine."""
    return (told.model, told.tokens_per_block) == (own.model, own.tokens_per_block)


def disagreement(told: ToldEngine, own: Iterable[ToldEngine]) -> str | None:
    """One sentence about settings of two kvpins that disagree; None if none do."""
    own = list(own)
    mine = match(told, own)
    if mine is None:
        same = next((each for each in own if each.id == told.id), None)
        if same is None or (same.is_local and told.is_local):
            return None  # single machines reach them: they are two, and a port may just have changed
        return (
            f"engine {told.id!r} is {told.address} there and {same.address} here, so it counts as two; "
            "give both kvpins the same address, or an id of your own"
        )
    if None in (told.model, mine.model) or hash_alike(told, mine):
        return None
    return (
        f"engine {mine.id!r} serves {told.model!r} in blocks of {told.tokens_per_block} tokens there and "
        f"{mine.model!r} in blocks of {mine.tokens_per_block} here: only its load is shared; "
        "give both kvpins the same engines and models"
    )
