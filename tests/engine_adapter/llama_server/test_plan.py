import random
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
from engine_adapter.llama_server.saved_entry import Saved
from engine_adapter.llama_server.slots import Slot, SlotOperation, SlotTable
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
# As on a CPU with a model of 98M parameters: 5.6 ms to compute, 0.29 ms to save, 0.035 ms to restore a token.
SLOW_PREFILL = replace(RATES, prefill_s=in_proportion(180.0), save_bytes_s=3.5e5, restore_bytes_s=2.9e6)


def run(*bounds):
    return array("i", range(*bounds))


def file(name, tokens, **changes):
    size = 100 * len(tokens)
    saved = Saved(1, "k", None, len(tokens), size, 1, 0.0, 0.0, 0, name=name, tokens=tokens)
    return structs.replace(saved, **changes)


def slot(slot_id, tokens=None, **fields):
    return Slot(slot_id, array("i") if tokens is None else tokens, **fields)


def pinned(slot_id, tokens, until, count):
    return slot(slot_id, tokens, pinned=count, pinned_until=until)


def decide(prompt, slots, saved=(), *, salt=None, now=0.0, can_save=True, can_restore=True, rates=RATES):
    return plan(prompt, salt, slots, saved, rates, now, can_save=can_save, can_restore=can_restore)


# --- which slot ----------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [run(100), run(300)])
def test_the_last_token_is_always_computed(held):
    choice = decide(run(100), [slot(0, held)])
    assert (choice.cost.cached_tokens, choice.cost.firm) == (99, True)


def test_an_unknown_tail_may_make_it_more():
    choice = decide(run(100), [slot(0, run(90), unknown=5)])
    assert (choice.cost.cached_tokens, choice.cost.firm) == (90, False)


@pytest.mark.parametrize(
    ("held", "unknown", "salt"),
    [
        (run(99), 5, None),  # the 100th is computed anyway
        (run(90), 0, None),
        (array("i", [*range(80), 7]), 5, None),  # parts before the tail
        (run(90), 5, "other"),
        (run(0), 5, "other"),
    ],
)
def test_otherwise_the_figure_is_firm(held, unknown, salt):
    assert decide(run(100), [slot(0, held, unknown=unknown, salt=salt)]).cost.firm


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


@pytest.mark.parametrize("saved", [0, 120])
def test_a_few_shared_tokens_are_no_reason_to_overwrite_a_conversation(saved):
    held, prompt = slot(0, run(120), saved=saved), array("i", [*range(20), *range(900, 1000)])
    assert decide(prompt, [held, slot(1)]).slot == 1
    longer = slot(0, run(2000), saved=2000)
    choice = decide(array("i", [*range(1000), 7]), [longer, slot(1)])
    assert (choice.slot, choice.cost.cached_tokens) == (0, 1000), "a shared document is"
    choice = decide(run(20), [held, slot(1)])
    assert (choice.slot, choice.cost.cached_tokens) == (0, 19), "a short prompt that is asked again is"


def test_among_empty_slots_the_one_unused_for_longest_then_the_lower_id():
    assert decide(run(9), [slot(0, since=3.0), slot(1, since=1.0), slot(2, since=1.0)], now=9.0).slot == 1


def test_content_nobody_knows_is_lost_as_well():
    choice = decide(run(10), [slot(0, unknown=1000)], can_save=False)
    assert choice.cost.regret_s == pytest.approx(0.5)
    assert not choice.cost.firm


def test_of_two_that_cost_the_same_the_empty_slot():
    held = slot(0, run(500, 600), since=-5.0)
    assert decide(run(9), [held, slot(1)], rates=replace(RATES, reuse_probability=0.0)).slot == 1


# --- restore -------------------------------------------------------------------------------------


def test_no_file_where_restoring_does_not_pay_and_nothing_is_saved():
    slots = [slot(0, run(5000, 6000), saved=1000)]
    choice = decide(run(1000), slots, [file("f", run(900))], can_restore=False)
    assert (choice.restore, choice.save_first) == (None, False)
    assert choice.cost.regret_s == pytest.approx(0.5)  # a file that cannot be restored spares nothing


def test_of_two_files_that_cost_the_same_the_first():
    files = [file("a", run(900)), file("b", run(900))]
    assert decide(run(1000), [slot(0)], files).restore is files[0]
    assert decide(run(1000), [slot(0)], files[::-1]).restore is files[1]


# --- save first ----------------------------------------------------------------------------------


def test_not_when_it_is_saved_cannot_be_saved_or_hardly_comes_back():
    held = slot(0, run(5000, 6000))
    assert not decide(run(10), [slot(0, run(5000, 6000), saved=1000)]).save_first
    assert not decide(run(10), [held], can_save=False).save_first
    assert not decide(run(10), [held], rates=replace(RATES, reuse_probability=0.1)).save_first


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


# --- pins ----------------------------------------------------------------------------------------


def test_when_every_slot_is_pinned_the_pin_that_ends_first_yields():
    slots = [pinned(0, run(5000, 5010), 60.0, 10), pinned(1, run(6000, 9000), 50.0, 3000)]
    choice = decide(run(1000), slots, [file("f", run(990))])
    assert (choice.slot, choice.over_pin, choice.restore.name) == (1, True, "f")


# --- the least of all ----------------------------------------------------------------------------


def naive_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def every_option(prompt, slots, saved, now):
    """Everything that may be done: (slot, entry, save first, tokens reused, tokens that stay)."""
    for each in slots:
        own = naive_prefix(each.tokens, prompt) if each.salt is None else 0
        options = [(None, own, own)]
        if each.operation is None:
            most = len(prompt) - 1  # a server computes the last token of each prompt
            gains = [
                (entry, min(naive_prefix(entry.tokens, prompt), most))
                for entry in saved
                if entry.salt is None
            ]
            options += [
                (entry, gain, 0) for entry, gain in gains if gain > min(own, most) and gain >= LEAST_GAIN
            ]
        for entry, gain, kept in options:
            if each.pinned_until <= now or kept >= each.pinned:
                yield each, entry, False, gain, kept
                if each.saved < each.length:
                    yield each, entry, True, gain, kept


def regret(each, kept, safe, rates, now):
    """What overwriting is expected to cost when `safe` leading tokens lie in a file."""
    if kept > 0 and kept == len(each.tokens):
        return 0.0
    later = rates.prefill_s(max(each.length - max(kept, safe), 0))
    if safe > kept:
        later += rates.overhead_s + safe * rates.bytes_per_token / rates.restore_bytes_s
    age = now - each.since if each.operation is None else 0.0
    return later * rates.reuse_probability * 2 ** -(age / rates.half_life_s)


def every_total(prompt, slots, saved, rates, now):
    """Total of every option, straight from the rules: {(slot, file name, save first): seconds}."""
    totals = {}
    for each, entry, save_first, gain, kept in every_option(prompt, slots, saved, now):
        running = each.operation is SlotOperation.REQUEST
        others = sum(other.operation is SlotOperation.REQUEST for other in slots) - running
        wait = max(rates.hold_s - (now - each.since), rates.hold_s / 4) if running else 0.0
        io = 0.0
        if save_first:
            io += rates.overhead_s + each.length * rates.bytes_per_token / rates.save_bytes_s
        if entry is not None:
            io += rates.overhead_s + entry.size / rates.restore_bytes_s
            io += entry.size / rates.disk_bytes_s if entry.tier is Tier.DISK else 0.0
        prefill = rates.prefill_s(len(prompt) - max(min(gain, len(prompt) - 1), 0))
        later = regret(each, kept, each.length if save_first else each.saved, rates, now)
        if kept < min(LEAST_SHARED, len(each.tokens), len(prompt)):
            in_place = max(min(kept, len(prompt) - 1), 0)
            later += rates.prefill_s(len(prompt)) - rates.prefill_s(len(prompt) - in_place)
        totals[each.id, entry and entry.name, save_first] = wait + io * (1 + others) + prefill + later
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
)


def test_a_slot_that_shares_a_token_is_priced_as_an_empty_one_on_a_curve_that_bends():
    prompt, rates = run(44), replace(RATES, prefill_s=in_proportion(4220.0, 0.72), reuse_probability=0.0)
    shared = array("i", [*prompt[:1], *range(1000, 1100)])
    choice = decide(prompt, [slot(0, shared)], rates=rates)
    assert choice.cost.cached_tokens == 1
    assert choice.cost.total_s == pytest.approx(rates.prefill_s(44))


@settings(max_examples=200)
@given(prompt=TOKENS, slots=slot_lists(), saved=file_lists(), rates=SOME_RATES)
def test_the_choice_is_the_least_of_all_there_is(prompt, slots, saved, rates):
    now = 100.0
    totals = every_total(prompt, slots, saved, rates, now)
    choice = decide(prompt, slots, saved, now=now, rates=rates)
    if not totals:
        assert choice.over_pin
        assert slots[choice.slot].pinned_until == min(each.pinned_until for each in slots)
        return
    key = (choice.slot, choice.restore and choice.restore.name, choice.save_first)
    assert not choice.over_pin
    assert choice.cost.total_s == pytest.approx(totals[key])
    assert choice.cost.total_s == pytest.approx(min(totals.values()))


@settings(max_examples=50)
@given(slots=slot_lists(), saved=file_lists(), prompt=TOKENS, seed=st.randoms(use_true_random=False))
def test_the_order_of_the_slots_changes_nothing(slots, saved, prompt, seed):
    shuffled = list(slots)
    seed.shuffle(shuffled)
    assert decide(prompt, slots, saved, now=100.0) == decide(prompt, shuffled, saved, now=100.0)


# --- more conversations than slots ---------------------------------------------------------------


class World:
    """A server that does what plans say, exactly: what is saved becomes a file, what is computed stays."""

    def __init__(self, slots, rates):
        self.table = SlotTable(slots)
        self.rates = rates
        self.files = []
        self.now = 0.0

    def turn(self, prompt, answer):
        choice = decide(prompt, self.table, self.files, now=self.now, rates=self.rates)
        if choice.save_first:
            content = self.table[choice.slot].tokens
            self.files.append(file(f"f{len(self.files)}", content))
        if choice.restore is not None:
            self.table.hold(choice.slot, choice.restore.tokens, None, saved=len(choice.restore.tokens))
        hit = min(naive_prefix(self.table[choice.slot].tokens, prompt), len(prompt) - 1)
        assert hit == choice.cost.cached_tokens
        self.table.begin(choice.slot, SlotOperation.REQUEST, self.now)
        self.table.hold(choice.slot, prompt, None)
        self.table.hold(choice.slot, prompt + answer, None)
        self.now += 1.0
        self.table.end(choice.slot, self.now)
        return hit


@settings(max_examples=25)
@given(slots=st.integers(1, 5), mixed=st.booleans(), seed=st.integers(0, 99), system=st.integers(0, 200))
def test_more_conversations_than_slots_and_each_goes_on_with_all_it_had(slots, mixed, seed, system):
    """Every one surely comes back, so what a save costs never exceeds what it is expected to spare."""
    world = World(slots, replace(SLOW_PREFILL, reuse_probability=1.0, half_life_s=1e9))
    count, order = slots + 1, random.Random(seed)  # noqa: S311 - no secret
    held = [array("i", [*range(system), *range(1000 * n, 1000 * n + 300)]) for n in range(1, count + 1)]
    reusable = [0] * count
    for step in range(4 * count):
        n = order.randrange(count) if mixed else step % count
        prompt = held[n] + array("i", [10**6 + step] * 80)
        answer = array("i", [2 * 10**6 + step] * 50)
        assert world.turn(prompt, answer) >= reusable[n]
        held[n] = prompt + answer
        reusable[n] = len(held[n])
    assert world.table.violations == 0


def test_a_tail_that_costs_less_than_its_save_is_computed_again():
    world = World(1, RATES)
    first, second = run(1000), run(5000, 6000)
    for prompt, hit in (
        (first, 0),
        (second, 0),
        (first + run(90), 1000),
        (second, 1000 - 1),
        (first + run(90), 1000),
    ):
        assert world.turn(prompt, run(0)) == hit


# --- write-back and eviction ---------------------------------------------------------------------


def test_it_is_not_when_busy_clean_or_empty():
    for each in (slot(0, run(1000), operation=SlotOperation.SAVE), slot(0, run(1000), saved=1000), slot(0)):
        assert not worth_saving(each, RATES, 99.0, 0, idle_s=2.0)


def test_it_is_while_the_streams_it_holds_up_are_few():
    held = slot(0, run(1000))
    assert worth_saving(held, RATES, 2.0, 3, idle_s=2.0)  # 0.494 s spared, 4 × 0.102 s spent
    assert not worth_saving(held, RATES, 2.0, 4, idle_s=2.0)


def test_it_is_while_enough_is_unsaved_and_somebody_may_come_back():
    assert not worth_saving(slot(0, run(1000), saved=900), RATES, 2.0, 0, idle_s=2.0)
    assert worth_saving(slot(0, run(1000), saved=500), RATES, 2.0, 0, idle_s=2.0)
    assert not worth_saving(slot(0, run(1000)), RATES, 3 * 1800.0, 0, idle_s=2.0)


# --- what is to be kept --------------------------------------------------------------------------


def test_what_is_to_be_kept_is_saved_first_though_it_lay_idle_for_long():
    for kept_until, saves in ((4e5, True), (2e5, False)):
        idle = slot(0, run(500), kept_until=kept_until)
        assert decide(run(5000, 5100), [idle], now=3e5).save_first is saves
        assert worth_saving(idle, RATES, 3e5, 0, idle_s=1.0) is saves


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


def test_a_save_tells_the_size_of_a_token_at_once_however_quick_it_was(book):
    book.saved(100, 1_000_000, 0.0)
    assert book.bytes_per_token == 10_000
    book.saved(10, 0, 0.1)
    assert book.bytes_per_token == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_what_measures_nothing_teaches_nothing(book, seconds):
    book.restored(1000, seconds)
    assert book == SlotRates()


def test_one_odd_sample_changes_no_mind(book):
    book.held(60.0)
    assert book.hold_s == SlotRates().hold_s
    teach(book.held, *[(0.5,)] * 6, (60.0,))
    assert book.hold_s == 0.5


def test_what_is_long_past_does_not_count(book):
    teach(book.held, *[(1.0,)] * WINDOW, *[(0.1,)] * (WINDOW // 2 + 1))
    assert book.hold_s == 0.1
