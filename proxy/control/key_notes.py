"""What an operator should know of a key that was just issued: what it changed for the clients of others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from proxy.control.keys import KeyAnswer
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.request.tenants import Tenants


@dataclass(frozen=True, slots=True)
class Before:
    """Before the key was issued: whether requests needed no key, and which engines were used."""

    open: bool
    used: frozenset[str]


@dataclass(frozen=True, slots=True)
class KeyNotes:
    """Says what an issued key has changed."""

    tenants: Tenants
    fleet: Fleet

    def before(self) -> Before:
        """To be asked before the key is issued."""
        return Before(
            self.tenants.open,
            frozenset(each.id for each in self.fleet.engines.values() if not _is_refused(each.state)),
        )

    def since(self, before: Before, key: KeyAnswer) -> list[str]:
        """A sentence for each change that may surprise."""
        return [*self._notes(before, key)]

    def _notes(self, before: Before, key: KeyAnswer) -> Iterator[str]:
        if before.open and not self.tenants.open:
            yield "this is the first key: from now on, every request needs one"
        engines = self.fleet.engines.values()
        if lost := [each.id for each in engines if each.id in before.used and _is_refused(each.state)]:
            yield (
                f"not used any more, because several tenants would share their KV: {', '.join(lost)}; set "
                f"share_kv=true on them, or remove the key: kvpin keys remove {key.id}"
            )
        if any(each.is_served_there for each in engines):
            return  # another kvpin knows what these serve
        for model in key.models or ():
            if not self.fleet.has_model(model):
                yield f"no engine serves {model!r} now"


def _is_refused(state: EngineState) -> bool:
    return state is EngineState.REFUSED
