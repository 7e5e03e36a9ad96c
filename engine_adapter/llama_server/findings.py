"""Findings about a llama-server, with the flags that fix them."""

from __future__ import annotations

from collections.abc import Iterator

from engine_adapter.llama_server.discovery import ServerFacts
from engine_adapter.types import Finding


def findings_of(facts: ServerFacts) -> Iterator[Finding]:
    """The reasons why kvpin cannot use the server fully, the most important first."""
    if facts.ram_cache:
        yield Finding(
            "its RAM cache is on: it changes slots unseen by kvpin, and can corrupt an answer",
            "start the server with --cache-ram 0",
        )
    if facts.looks_unified:
        verb = "share" if facts.is_unified else "seem to share"
        yield Finding(
            f"its slots {verb} one KV pool (-kvu, or no -np): a prompt can evict those of other slots",
            f"start the server with -no-kvu -np {facts.slots} -c {facts.slots}*CTX, where CTX is the context "
            "of one slot",
        )
    if not facts.can_save:
        yield Finding(
            "no prefix can be saved or restored",
            "start the server with --slot-save-path DIR, a directory that exists, best in memory",
        )
    if not facts.has_slots:
        yield Finding("kvpin cannot watch its slots", "start the server with --slots")
    if facts.is_sleeping:
        yield Finding(
            "it sleeps when idle and loses all KV",
            "start the server without --sleep-idle-seconds, or with -1",
        )
