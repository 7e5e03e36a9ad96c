import math
from array import array
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.llama_server.checkpoints import PLAIN
from engine_adapter.llama_server.slots import NEVER, SlotBusy, SlotOperation, SlotTable


def ids(*values):
    return array("i", values)


def run(*bounds):
    return array("i", range(*bounds))


def contents(table):
    return [(list(slot.tokens), slot.unknown, slot.salt, slot.saved) for slot in table]


def test_content_is_known_or_unknown():
    table = SlotTable(1)
    table.hold(0, run(10), "tenant", unknown=5, saved=12)
    slot = table[0]
    assert contents(table) == [(list(range(10)), 5, "tenant", 12)]
    assert (slot.length, slot.is_empty, slot.dirty) == (15, False, True)
    table.hold(0, run(10), "tenant", saved=99)
    assert (slot.saved, slot.dirty) == (10, False)


def test_no_tokens_are_an_erased_slot():
    table = SlotTable(1)
    table.hold(0, run(10), "tenant", saved=10)
    table.hold(0, ids(), "tenant")
    assert contents(table) == [([], 0, None, 0)]
    table.hold(0, ids(), "tenant", unknown=7)
    assert (table[0].length, table[0].salt, table[0].is_empty) == (7, "tenant", False)


@pytest.mark.parametrize(
    ("tokens", "salt", "saved"),
    [
        (run(20), "a", 8),  # the conversation goes on: what was saved still leads it
        (run(5), "a", 5),
        (ids(0, 1, 2, 99), "a", 3),
        (run(20), "b", 0),
        (run(20), None, 0),
    ],
)
def test_what_was_saved_stays_saved_as_far_as_the_content_stays(tokens, salt, saved):
    table = SlotTable(1)
    table.hold(0, run(10), "a", saved=8)
    table.hold(0, tokens, salt)
    assert table[0].saved == saved


def test_a_text_that_lost_its_beginning_may_be_moved():
    parts = [array("i", [*range(at, at + 25)] * 4) for at in range(0, 200, 25)]
    table = SlotTable(1, replace(PLAIN, chunk=20))
    table.hold(0, ids(), "a", unknown=200, text=sum(parts, ids()))
    assert table[0].likely_reusable(sum(parts[2:], ids()), "a") == 150
    assert table[0].likely_reusable(sum(parts[2:], ids()), "b") == 0
    table.follow(PLAIN)
    assert table[0].likely_reusable(sum(parts[2:], ids()), "a") == 0


def test_a_pin_covers_known_tokens_and_is_replaced_by_the_next():
    table = SlotTable(1)
    table.hold(0, run(10), None, unknown=5)
    assert table.pin(0, 12, 60.0) == 10
    assert (table[0].pinned, table[0].pinned_until) == (10, 60.0)
    assert table.pin(0, 4, 30.0) == 4
    assert (table[0].pinned, table[0].pinned_until) == (4, 30.0)
    assert table.pin(0, 0, 99.0) == 0
    assert (table[0].pinned, table[0].pinned_until) == (0, NEVER)


def test_a_pin_ends_when_one_of_its_tokens_goes():
    table = SlotTable(1)
    table.hold(0, run(10), None)
    table.pin(0, 8, 60.0)
    table.hold(0, ids(*range(8), 99, 98), None)
    assert (table[0].pinned, table[0].pinned_until) == (8, 60.0)
    table.hold(0, ids(*range(7), 99), None)
    assert (table[0].pinned, table[0].pinned_until) == (0, NEVER)


def test_a_wipe_takes_contents_and_pins_and_leaves_operations():
    table = SlotTable(2)
    table.hold(0, run(10), "a", saved=10)
    table.pin(0, 10, 60.0)
    table.begin(0, SlotOperation.REQUEST, 1.0)
    table.wipe()
    assert contents(table) == [([], 0, None, 0)] * 2
    assert (table[0].pinned, table[0].pinned_until) == (0, -math.inf)
    assert [slot.uses for slot in table] == [2, 1]  # who compares uses sees that the content is no more
    assert table[0].operation is SlotOperation.REQUEST
    table.end(0, 2.0)
    assert table.in_flight == 0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 2), st.sampled_from(SlotOperation)),
        st.tuples(st.just("end"), st.integers(0, 2)),
    ),
    max_size=30,
)


@given(STEPS)
def test_whatever_is_asked_one_operation_is_in_flight_per_slot(steps):
    """Against a plain model: the set of busy slots, and which steps it allows."""
    table, busy, refused, uses = SlotTable(3), set(), 0, [0, 0, 0]
    for now, (verb, slot_id, *operation) in enumerate(steps):
        step = partial(getattr(table, verb), slot_id, *operation, float(now))
        if (verb == "begin") == (slot_id not in busy):
            step()
            busy ^= {slot_id}
            uses[slot_id] += verb == "begin"
        else:
            refused += 1
            with pytest.raises(SlotBusy):
                step()
        assert {slot.id for slot in table if not slot.is_idle} == busy
        assert table.in_flight == len(busy)
        assert [slot.uses for slot in table] == uses
        assert table.violations == refused


def test_what_ends_with_which_change_of_the_content():
    """A result is expected until the content changes at all; it is retained until some of it goes."""
    table = SlotTable(1)
    table.hold(0, run(10), None)
    slot = table[0]
    slot.kept_until, slot.kept_for, slot.due_until = 50.0, "others", 50.0
    table.hold(0, run(12), None)
    assert (slot.kept_until, slot.kept_for, slot.due_until) == (50.0, "others", NEVER)
    table.hold(0, run(11), None)
    assert (slot.kept_until, slot.kept_for) == (NEVER, None)


def test_what_idle_slots_hold_of_a_conversation_is_out_of_date_once_another_slot_serves_it():
    table = SlotTable(4)
    for slot, session in zip(table, (7, 7, 8, None), strict=True):
        table.hold(slot.id, run(10), None)
        table.serve(slot.id, session)
    assert [slot.is_outdated for slot in table] == [True, False, False, False]
    table.begin(1, SlotOperation.REQUEST, 0.0)
    table.serve(2, 7)  # from another conversation's slot, while slot 1 answers it, too
    table.serve(3, None)
    assert [slot.is_outdated for slot in table] == [True, False, False, False]
    table.end(1, 1.0)
    table.serve(0, 7)
    assert [slot.is_outdated for slot in table] == [False, True, True, False]
    table.hold(1, run(20), None)  # an answer
    table.hold(2, run(5), None)
    assert [(slot.session, slot.is_outdated) for slot in table][1:3] == [(7, True), (None, False)]
