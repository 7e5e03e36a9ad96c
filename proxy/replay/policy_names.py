"""The policies by the names users give them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from proxy.replay.kvpin import TERMS, Kvpin
from proxy.replay.policy import Policy, SimFleet
from proxy.replay.rules import (
    BoundedHash,
    DynamoLike,
    LeastLoaded,
    LlmdDefault,
    MinTtft,
    RoundRobin,
    SglangCacheAware,
    Sticky,
)

# An upper bound: one cache that all engines share. It has hits and no times.
ORACLE = "oracle"

POLICIES: dict[str, Callable[[SimFleet, int], Policy]] = {
    "kvpin": Kvpin,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "sticky": Sticky,
    "chwbl": BoundedHash,
    "sglang": SglangCacheAware,
    "llm-d": LlmdDefault,
    "dynamo": DynamoLike,
    "min-ttft": MinTtft,
}
ABLATIONS: dict[str, Callable[[SimFleet, int], Policy]] = {
    f"kvpin-no-{term}": partial(Kvpin, without=term) for term in TERMS
}
# Names that stand for several policies.
GROUPS: dict[str, tuple[str, ...]] = {
    "all": (*POLICIES, ORACLE),
    "ablations": ("kvpin", *ABLATIONS),
}
NAMES = (*POLICIES, *ABLATIONS, ORACLE)


class UnknownPolicy(ValueError):
    """There is no policy of that name; the message lists the names."""


def resolve(names: Iterable[str]) -> tuple[str, ...]:
    """Names with groups spelled out, each once, in the order given. Raises UnknownPolicy if a name is
    unknown."""
    resolved: dict[str, None] = {}
    for name in names:
        if name not in GROUPS and name not in NAMES:
            known = ", ".join((*GROUPS, *NAMES))
            raise UnknownPolicy(f"there is no policy {name!r}; there are {known}")
        resolved.update(dict.fromkeys(GROUPS.get(name, (name,))))
    return tuple(resolved)


def make(name: str, fleet: SimFleet, seed: int) -> Policy:
    """A policy by its name, other than the oracle."""
    return {**POLICIES, **ABLATIONS}[name](fleet, seed)
