from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine_adapter.llama_server.checkpoints import PLAIN
from engine_adapter.llama_server.plan import (
    LEAST_GAIN,
    LEAST_SHARED,
    WINDOW,
    SlotRates,
    plan,
    worth_saving,
)
from engine_adapter.llama_server.saved_files import Saved
from engine_adapter.llama_server.slots import Slot, SlotOperation
from engine_adapter.types import Tier


def in_proportion(tok_s, power=1.0):
    return lambda tokens: tokens**power / tok_s


# A token takes 1 ms to compute, 0.1 ms to save, 0.01 ms to restore, 0.02 ms more from disk.
RATES = SlotRates(
    prefill_s=in_proportion(1000.0),
    save_bytes_s=1e6,
    restore_bytes_s=1e7,
    disk_bytes_s=5e6,
    bytes_per_token=100.0,
    hold_s=4.0,
    reuse_probability=0.5,
)


def run(*bounds):
    return array("i", range(*bounds))


def file(name, tokens, **changes):
    size = 100 * len(tokens)
    saved = Saved(1, "k", None, len(tokens), size, 1, 0.0, 0.0, 0, name=name, tokens=tokens)
    return structs.replace(saved, **changes)


def slot(slot_id, tokens=None, **fields):
    return Slot(slot_id, array("i") if tokens is None else tokens, **fields)


def decide(prompt, slots, saved=(), *, salt=None, now=0.0, can_save=True, can_restore=True, rates=RATES):
    return plan(prompt, salt, slots, saved, rates, now, can_save=can_save, can_restore=can_restore)


# --- which slot ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "unknown", "salt", "firm"),
    [
        pytest.param(run(90), 5, None, False, id="an unknown tail may go on with the prompt"),
        pytest.param(run(0), 1000, None, False, id="nobody knows what is there"),
        pytest.param(run(90), 0, None, True, id="all is known"),
        pytest.param(run(99), 5, None, True, id="the 100th is computed anyway"),
        pytest.param(array("i", [*range(80), 7]), 5, None, True, id="it parts before the tail"),
        pytest.param(run(90), 5, "other", True, id="of another tenant"),
    ],
)
def test_a_prediction_is_firm_unless_more_may_be_reused(held, unknown, salt, firm):
    assert decide(run(100), [slot(0, held, unknown=unknown, salt=salt)]).cost.firm is firm


def moving(slot_id, tokens, **fields):
    memory = replace(PLAIN, chunk=16).restored(len(tokens))
    return slot(slot_id, tokens, memory=memory, **fields)


class TestMovedKv:
    def test_a_prompt_that_lost_its_beginning_goes_where_the_rest_is(self):
        prompt = run(100, 2000) + run(3000, 3010)
        choice = decide(prompt, [moving(0, run(5000, 7000)), moving(1, run(2000)), moving(2, run(0))])
        assert (choice.slot, choice.cost.cached_tokens, choice.cost.firm) == (1, 1900, True)
        assert choice.cost.prefill_s == pytest.approx(0.010)
        assert not choice.save_first, "few tokens are overwritten"

    def test_unknown_tokens_may_be_moved_too(self):
        assert not decide(run(50, 200), [moving(0, run(100), unknown=5)]).cost.firm
        assert not decide(run(50, 200), [moving(0, run(100), operation=SlotOperation.REQUEST)]).cost.firm

    def test_a_pin_holds_what_would_be_moved(self):
        held = moving(0, run(2000), pinned=2000, pinned_until=9.0)
        assert decide(run(500, 2000), [held, moving(1, run(0))]).slot == 1
        assert decide(run(2100), [held, moving(1, run(0))]).slot == 0

    def test_so_it_is_from_files(self):
        rules, entry = replace(PLAIN, chunk=16), file("f", run(20) + run(100, 2000))
        prompt = run(20) + run(500, 2000)
        for each, cached in ((rules, 1519), (PLAIN, 0)):
            slots = [slot(0, memory=each.restored(0))]
            choice = plan(
                prompt, None, slots, [entry], RATES, 0.0, can_save=True, can_restore=True, rules=each
            )
            assert choice.cost.cached_tokens == cached


def test_a_prompt_whose_text_alone_is_known_goes_where_its_beginning_was():
    text = array("i", b"the ship left the harbour at dawn " * 40)
    mine = {"unknown": 400, "text": text, "salt": "s"}

    def choose(busy=None, *, text=text, salt="s"):
        slots = slot(0), slot(1, **mine, operation=busy), slot(2)
        return plan(array("i"), salt, slots, (), RATES, 0.0, can_save=False, can_restore=False, text=text)

    choice = choose()
    assert (choice.slot, choice.cost.cached_tokens) == (1, 0), "nothing is predicted for it"
    assert choose(text=text[:-8] + text[:20]).slot == 1
    assert choose(text=text[::-1]).slot != 1
    assert choose(salt="another").slot != 1
    assert choose(SlotOperation.SETTLE).cost.wait_s > 0, "it waits for that slot"


def test_among_empty_slots_the_one_unused_for_longest_then_the_lower_id():
    assert decide(run(9), [slot(0, since=3.0), slot(1, since=1.0), slot(2, since=1.0)], now=9.0).slot == 1


def test_of_two_that_cost_the_same_the_empty_slot():
    held = slot(0, run(500, 600), since=-5.0)
    assert decide(run(9), [held, slot(1)], rates=replace(RATES, reuse_probability=0.0)).slot == 1


# --- restore -------------------------------------------------------------------------------------


def test_of_two_files_that_cost_the_same_the_first():
    files = [file("a", run(900)), file("b", run(900))]
    assert decide(run(1000), [slot(0)], files).restore is files[0]
    assert decide(run(1000), [slot(0)], files[::-1]).restore is files[1]


# --- busy slots ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "began", "wait_s"),
    [
        (SlotOperation.REQUEST, 9.0, 3.0),
        (SlotOperation.REQUEST, 0.0, 1.0),  # overstays: a quarter of the usual time
        (SlotOperation.FOREIGN, 9.5, 3.5),
        (SlotOperation.SAVE, 10.0, 0.102),
        (SlotOperation.RESTORE, 10.0, 0.012),
        (SlotOperation.ERASE, 10.0, 0.012),
        (SlotOperation.SAVE, 0.0, 0.0255),
    ],
)
def test_a_busy_slot_is_waited_for_as_long_as_its_operation_usually_takes(operation, began, wait_s):
    choice = decide(run(1100), [slot(0, run(1000), operation=operation, since=began)], now=10.0)
    assert choice.cost.wait_s == pytest.approx(wait_s)
    assert choice.cost.cached_tokens == 1000
    assert not choice.cost.firm  # the answer that runs adds tokens


# --- the least of all ----------------------------------------------------------------------------


def naive_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def every_option(prompt, slots, saved, now, *, can_save):
    """Everything that may be done: (slot, entry, save first, tokens reused, tokens that stay)."""
    most = max(len(prompt) - 1, 0)  # a server computes the last token of each prompt
    for each in slots:
        own = naive_prefix(each.tokens, prompt) if each.salt is None else 0
        options = [(None, min(own, most), own)]
        for entry in saved if each.operation is None else ():
            gain = min(naive_prefix(entry.tokens, prompt), most) if entry.salt is None else 0
            if gain > min(own, most) and gain >= LEAST_GAIN:
                options.append((entry, gain, 0))
        for entry, gain, kept in options:
            if each.pinned_until <= now or kept >= each.pinned:
                yield each, entry, False, gain, kept
                if can_save and each.saved < each.length:
                    yield each, entry, True, gain, kept


def regret(each, kept, safe, rates, now):
    """What overwriting is expected to cost when `safe` leading tokens lie in a file."""
    if kept > 0 and kept == len(each.tokens):
        return 0.0
    later = rates.prefill_s(max(each.length - max(kept, safe), 0))
    if safe > kept:
        later += rates.overhead_s + safe * rates.bytes_per_token / rates.restore_bytes_s
    age = now - each.since if each.operation is None else 0.0
    return later * max(rates.reuse_probability * 2 ** -(age / rates.half_life_s), rates.returns(age))


def every_total(prompt, slots, saved, rates, now, *, can_save, can_restore):
    """Total of every option, straight from the rules: {(slot, file name, save first): (seconds, reused)}."""
    totals = {}
    usable = saved if can_restore else ()
    for each, entry, save_first, gain, kept in every_option(
        prompt, slots, usable, now, can_save=can_save and can_restore
    ):
        running = each.operation is SlotOperation.REQUEST
        others = sum(other.operation is SlotOperation.REQUEST for other in slots) - running
        wait = max(rates.hold_s - (now - each.since), rates.hold_s / 4) if running else 0.0
        io = 0.0
        if save_first:
            io += rates.overhead_s + each.length * rates.bytes_per_token / rates.save_bytes_s
        if entry is not None:
            io += rates.overhead_s + entry.size / rates.restore_bytes_s
            io += entry.size / rates.disk_bytes_s if entry.tier is Tier.DISK else 0.0
        prefill = rates.prefill_s(len(prompt) - gain)
        safe = each.saved if can_restore else 0  # a file that cannot be restored spares nothing
        later = regret(each, kept, each.length if save_first else safe, rates, now)
        if kept < min(LEAST_SHARED, len(each.tokens), len(prompt)):
            in_place = max(min(kept, len(prompt) - 1), 0)
            later += rates.prefill_s(len(prompt)) - rates.prefill_s(len(prompt) - in_place)
        totals[each.id, entry and entry.name, save_first] = wait + io * (1 + others) + prefill + later, gain
    return totals


TOKENS = st.builds(
    lambda shared, own, kind: array("i", [*range(shared), *range(1000 * kind, 1000 * kind + own)]),
    shared=st.integers(0, 60),
    own=st.integers(0, 40),
    kind=st.integers(1, 3),
)
SALTS = st.sampled_from([None, None, None, "other"])


@st.composite
def slot_lists(draw):
    slots = []
    for slot_id in range(draw(st.integers(1, 4))):
        tokens = draw(TOKENS | st.just(array("i")))
        slots.append(
            Slot(
                slot_id,
                tokens,
                unknown=draw(st.sampled_from([0, 0, 7, 70])),
                salt=draw(SALTS),
                operation=draw(st.sampled_from([None, None, SlotOperation.REQUEST])),
                since=draw(st.floats(0, 100)),
                saved=draw(st.integers(0, len(tokens))),
                pinned=draw(st.integers(0, len(tokens))),
                pinned_until=draw(st.sampled_from([0.0, 0.0, 200.0])),
            )
        )
    return slots


@st.composite
def file_lists(draw):
    return [
        file(
            f"f{number}",
            tokens,
            salt=draw(SALTS),
            tier=draw(st.sampled_from([Tier.HOST, Tier.DISK])),
            size=100 * len(tokens) + draw(st.integers(1, 2000)),
        )
        for number, tokens in enumerate(draw(st.lists(TOKENS, max_size=6)))
    ]


SOME_RATES = st.builds(
    SlotRates,
    prefill_s=st.builds(in_proportion, st.floats(10, 1e4), st.floats(0.7, 1.3)),
    save_bytes_s=st.floats(1e3, 1e7),
    restore_bytes_s=st.floats(1e3, 1e8),
    disk_bytes_s=st.floats(1e3, 1e8),
    bytes_per_token=st.just(100.0),
    hold_s=st.floats(0.001, 10),
    reuse_probability=st.floats(0, 1),
    half_life_s=st.floats(1, 1e4),
    returns=st.sampled_from([lambda idle_s: 0.0, lambda idle_s: 0.9]),
)


@settings(max_examples=150)
@given(TOKENS, slot_lists(), file_lists(), SOME_RATES, st.booleans(), st.sampled_from([True, True, False]))
def test_the_choice_is_the_least_of_all_there_is(prompt, slots, saved, rates, can_save, can_restore):
    now, able = 100.0, {"can_save": can_save, "can_restore": can_restore}
    totals = every_total(prompt, slots, saved, rates, now, **able)
    choice = decide(prompt, slots, saved, now=now, rates=rates, **able)
    if not totals:
        assert choice.over_pin, "every slot is pinned: the pin that ends first yields"
        assert slots[choice.slot].pinned_until == min(each.pinned_until for each in slots)
        return
    total_s, reused = totals[choice.slot, choice.restore and choice.restore.name, choice.save_first]
    assert not choice.over_pin
    assert choice.cost.cached_tokens == reused
    assert choice.cost.total_s == pytest.approx(total_s)
    assert total_s == pytest.approx(min(seconds for seconds, _ in totals.values()))


# --- write-back and eviction ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "now", "streams", "pays"),
    [
        pytest.param({}, 2.0, 3, True, id="it holds up few streams"),  # 0.494 s spared, 4 × 0.102 s spent
        pytest.param({}, 2.0, 4, False, id="it holds up many streams"),
        pytest.param({"saved": 500}, 2.0, 0, True, id="half of it is unsaved"),
        pytest.param({"saved": 900}, 2.0, 0, False, id="little of it is unsaved"),
        pytest.param({"saved": 1000}, 9.0, 0, False, id="all of it is saved"),
        pytest.param({"operation": SlotOperation.SAVE}, 9.0, 0, False, id="busy"),
        pytest.param({}, 1.9, 0, False, id="idle only just now"),
        pytest.param({}, 5400.0, 0, False, id="hardly anybody comes back"),
        pytest.param({"kept_until": 5401.0}, 5400.0, 0, True, id="its client retains it"),
    ],
)
def test_a_slot_is_written_back_if_that_pays(fields, now, streams, pays):
    assert worth_saving(slot(0, run(1000), **fields), RATES, now, streams, idle_s=2.0) is pays


# --- what is to be kept --------------------------------------------------------------------------


def test_what_a_client_retains_is_saved_before_it_is_overwritten_however_long_it_lay_idle():
    for kept_until, saves in ((4e5, True), (2e5, False)):
        assert (
            decide(run(5000, 5100), [slot(0, run(500), kept_until=kept_until)], now=3e5).save_first is saves
        )


@pytest.mark.parametrize(("can_save", "length"), [(True, 500), (False, 700)])
def test_a_slot_whose_tool_is_running_is_overwritten_last(can_save, length):
    """Without that, the slot that lay idle for longest would go."""
    waiting, person = slot(0, run(500), since=91.0), slot(1, run(1000, 1000 + length), since=95.0)
    assert decide(run(5000, 5100), [waiting, person], now=100.0, can_save=can_save).slot == 0
    waiting.due_until = 101.0
    assert decide(run(5000, 5100), [waiting, person], now=100.0, can_save=can_save).slot == 1
    waiting.due_until = 99.0
    assert decide(run(5000, 5100), [waiting, person], now=100.0, can_save=can_save).slot == 0


def test_a_slot_whose_conversation_went_on_elsewhere_is_overwritten_first():
    """Without that, the slot with less to lose would go."""
    moved, other = slot(0, run(900)), slot(1, run(1000, 1500))
    assert decide(run(5000, 5100), [moved, other], can_save=False).slot == 1
    moved.is_outdated = True
    assert decide(run(5000, 5100), [moved, other], can_save=False).slot == 0
    assert (
        decide(run(1000), [moved, other], can_save=False).cost.cached_tokens == 900
    )  # it may go on for all that


@pytest.fixture
def book():
    return SlotRates()


def teach(learn, *samples):
    for sample in samples:
        learn(*sample)


def test_saves_teach_bytes_per_second_beyond_the_overhead(book):
    teach(book.saved, *[(100, 1_000_000, 0.502)] * 3)
    assert book.save_bytes_s == pytest.approx(2_000_000)
    assert book.save_s(100) == pytest.approx(0.502)
    assert book.measured == {"save_bytes_s": book.save_bytes_s, "bytes_per_token": 10_000}


def test_a_save_tells_the_size_of_a_token_however_quick_it_was_and_measures_no_speed_then(book):
    book.saved(100, 1_000_000, 0.0)
    assert book.bytes_per_token == 10_000
    assert book.save_bytes_s == SlotRates().save_bytes_s


def test_one_odd_sample_changes_no_mind(book):
    book.held(60.0)
    assert book.hold_s == SlotRates().hold_s
    teach(book.held, *[(0.5,)] * 6, (60.0,))
    assert book.hold_s == 0.5


def test_what_is_long_past_does_not_count(book):
    teach(book.held, *[(1.0,)] * WINDOW, *[(0.1,)] * (WINDOW // 2 + 1))
    assert book.hold_s == 0.1
