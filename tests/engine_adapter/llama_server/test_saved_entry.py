import asyncio
from array import array

from engine_adapter.llama_server.saved_entry import Saved, from_found, least_valuable, salt_digest, value
from engine_adapter.llama_server.saved_files import Found
from engine_adapter.types import Tier

NOW = 10_000.0


def saved(name: str, *, tokens: int = 10, size: int = 100, used: float = NOW, uses: int = 0) -> Saved:
    content = array("i", range(tokens))
    return Saved(name, "k", None, content, size, Tier.HOST, 1, used, used, uses)


def names(chosen: list[Saved] | None) -> list[str] | None:
    return None if chosen is None else [each.name for each in chosen]


def test_a_digest_stands_for_a_salt():
    assert salt_digest(None) is None
    assert salt_digest("a") == salt_digest("a") != salt_digest("b")
    assert salt_digest("") not in {None, ""}
    assert "tenant" not in str(salt_digest("tenant"))
    assert len(str(salt_digest("\ud800"))) == 32  # what JSON may hold


def test_an_entry_says_in_its_sidecar_what_it_is_found_by():
    one = saved("n", used=5.0, uses=3)
    assert from_found(Tier.DISK, Found("n", one.sidecar(), one.tokens)).sidecar() == one.sidecar()


def test_value_is_in_tokens_uses_and_time_per_byte():
    base = value(saved("a"), NOW)
    assert value(saved("a", tokens=20), NOW) > base
    assert value(saved("a", uses=1), NOW) > base
    assert value(saved("a", size=200), NOW) < base
    assert value(saved("a"), NOW + 60) < base


def test_the_least_valuable_that_hold_enough():
    entries = [saved("new"), saved("old", used=NOW - 5000), saved("older", used=NOW - 9000)]
    assert names(least_valuable(entries, 0, NOW)) == []
    assert names(least_valuable(entries, -1, NOW)) == []
    assert names(least_valuable(entries, 1, NOW)) == ["older"]
    assert names(least_valuable(entries, 101, NOW)) == ["older", "old"]
    assert names(least_valuable(entries, 300, NOW)) == ["older", "old", "new"]
    assert names(least_valuable(entries, 301, NOW)) is None


async def test_what_is_pinned_used_or_worked_on_stays():
    pinned, used, busy, free = (saved(name) for name in ("pinned", "used", "busy", "free"))
    pinned.pinned_until, used.holds = NOW + 1, 1
    gate = asyncio.Event()
    busy.work = asyncio.create_task(gate.wait())
    assert names(least_valuable([pinned, used, busy, free], 1, NOW)) == ["free"]
    assert least_valuable([pinned, used, busy], 1, NOW) is None
    assert names(least_valuable([pinned], 1, NOW + 1)) == ["pinned"]

    waits = asyncio.create_task(busy.idle())
    gate.set()
    await waits
    assert not busy.is_busy
    assert names(least_valuable([busy], 1, NOW)) == ["busy"]
