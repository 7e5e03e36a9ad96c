import asyncio
from array import array

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.llama_server.plan import SlotRates
from engine_adapter.llama_server.saved_files import (
    Saved,
    kept,
    least_valuable,
    salt_digest,
)

NOW = 10_000.0
ROOM = 1000


def saved(name: str, *, tokens: int = 10, size: int = 100, used: float = NOW, uses: int = 0) -> Saved:
    content = array("i", range(tokens))
    return Saved(1, "k", None, tokens, size, 1, used, used, uses, name=name, tokens=content)


def names(chosen: list[Saved] | None) -> list[str] | None:
    return None if chosen is None else [each.name for each in chosen]


def test_a_digest_stands_for_a_salt():
    assert salt_digest(None) is None
    assert salt_digest("a") == salt_digest("a") != salt_digest("b")
    assert salt_digest("") not in {None, ""}
    assert "tenant" not in str(salt_digest("tenant"))
    assert len(str(salt_digest("\ud800"))) == 32  # what JSON may hold


def test_a_sidecar_holds_the_record_and_nothing_of_the_prompt():
    one = saved("n", used=5.0, uses=3)
    one.kept_until, one.kept_for = 99.0, "them"
    record = msgspec.json.decode(one.sidecar())
    assert record == {
        "format": 1, "key": "k", "salt": None, "tokens": 10, "size": 100, "checksum": 1, "created": 5.0,
        "last_used": 5.0, "uses": 3, "kept_until": 99.0, "kept_for": "them",
    }  # fmt: skip
    assert repr(one) == "Saved('n')"


def test_a_file_is_worth_the_seconds_that_it_is_likely_to_spare():
    rates = SlotRates(
        prefill_s=lambda tokens: tokens / 100,
        returns=lambda idle_s: 0.5 if idle_s < 1800 else 0.25,
        reuse_probability=0.1,
    )
    for age_s, uses, seconds_per_byte in ((0, 0, 0.01), (0, 2, 0.03), (1800, 0, 0.005)):
        one = saved("a", tokens=1000, size=500, used=NOW - age_s, uses=uses)
        assert rates.value(one, NOW) == (seconds_per_byte, NOW - age_s)


def least(entries: list[Saved], size: int, room: int = ROOM, now: float = NOW) -> list[str] | None:
    return names(least_valuable(entries, size, room, now, lambda each: (each.last_used, 0.0)))


def test_the_least_valuable_that_hold_enough():
    entries = [saved("new"), saved("old", used=NOW - 5000), saved("older", used=NOW - 9000)]
    assert least(entries, 0) == []
    assert least(entries, -1) == []
    assert least(entries, 1) == ["older"]
    assert least(entries, 101) == ["older", "old"]
    assert least(entries, 300) == ["older", "old", "new"]
    assert least(entries, 301) is None


async def test_what_is_pinned_used_or_worked_on_stays():
    pinned, used, busy, free = (saved(name) for name in ("pinned", "used", "busy", "free"))
    pinned.pins["test"], used.holds = NOW + 1, 1
    gate = asyncio.Event()
    busy.work = asyncio.create_task(gate.wait())
    assert least([pinned, used, busy, free], 1) == ["free"]
    assert least([pinned, used, busy], 1) is None
    assert least([pinned], 1, now=NOW + 1) == ["pinned"]

    waits = asyncio.create_task(busy.idle())
    gate.set()
    await waits
    assert not busy.is_busy
    assert least([busy], 1) == ["busy"]


def wanted(name: str, owner: str | None = None, *, until: float = NOW + 1, **fields) -> Saved:
    entry = saved(name, **fields)
    entry.kept_until, entry.kept_for = until, owner
    return entry


def test_what_is_kept_goes_after_all_else_until_its_time_is_over():
    entries = [wanted("kept", used=NOW - 9000), saved("new"), saved("old", used=NOW - 5000)]
    assert least(entries, 300) == ["old", "new", "kept"]
    assert least(entries, 300, now=NOW + 1) == ["kept", "old", "new"]


def test_half_of_the_room_can_be_kept_what_was_used_last_first():
    entries = [wanted(f"{age}", used=NOW - age) for age in (30, 10, 20)]
    assert names(sorted(kept(entries, 400, NOW), key=lambda each: each.name)) == ["10", "20"]
    assert least(entries, 300, 400) == ["30", "20", "10"]
    assert kept(entries, 199, NOW) == set()


@given(
    sizes=st.lists(st.tuples(st.integers(1, 50), st.sampled_from(["a", "b", "c"])), max_size=30),
    room=st.integers(0, 400),
)
def test_what_is_kept_is_bounded_and_shared_out(sizes, room):
    entries = [wanted(f"{n}", owner, size=size, used=n) for n, (size, owner) in enumerate(sizes)]
    chosen = kept(entries, room, NOW)
    assert sum(each.size for each in chosen) <= room / 2
    for owner in "abc":
        own = [each for each in entries if each.kept_for == owner]
        if sum(each.size for each in own) <= room / 2 / 3 - 50:
            assert set(own) <= chosen  # less than its share: all of it
