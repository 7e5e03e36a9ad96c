"""The rule of what is reused, by itself and against real servers that are asked the same."""

from __future__ import annotations

import math
import random
import time
from array import array
from dataclasses import replace
from itertools import chain

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine_adapter.llama_server.checkpoints import (
    PLAIN,
    Checkpoint,
    MemoryRules,
    SlotMemory,
    reusable,
    user_starts,
)
from engine_adapter.types import common_prefix
from scripts.make_gguf import gguf_path
from tests.engine_adapter.llama_server.slot_world import prompt_of

WINDOW = MemoryRules(slot_ctx=4096, window=128)
STATE = MemoryRules(slot_ctx=4096, is_recurrent=True)
FULL = MemoryRules(loses_window=True)
# Checkpoints, small batches: short prompts have many of them.
SMALL = ("-b", "128", "-ub", "32", "--ctx-checkpoints", "4", "--checkpoint-min-step", "64")
STEPS = 20


def small(rules):
    return replace(rules, batch=128, ubatch=32, most=4, spacing=64)


def computed(rules, *prompts, starts=()):
    """The memory of a slot after prompts, each given as (shared tokens, its tokens)."""
    memory = rules.restored(0)
    for shared, new in prompts:
        memory = memory.after(shared, new, starts)
    return memory


def made(memory):
    return [each.tokens for each in memory.checkpoints if not each.is_stale]


def answered(client, prompt, dice, **fields):
    """(tokens that the server reused, what its slot holds then)."""
    asked = {"prompt": prompt.tolist(), "n_predict": dice.choice((0, 5, 20)), "temperature": 0, "id_slot": 0}
    asked |= {"ignore_eos": True, "return_tokens": True, **fields}
    answer = client.post("/completion", json=asked).json()
    said = array("i", answer["tokens"])
    return answer["timings"]["cache_n"], (prompt + said)[: len(prompt) + max(len(said) - 1, 0)]


@pytest.mark.parametrize(("shape", "flags", "rules"), [
    ("tiny", (), PLAIN),
    ("swa", SMALL, small(WINDOW)),
    ("sinks", SMALL, small(WINDOW)),
    ("linear", SMALL, small(STATE)),
    ("conv", SMALL, small(STATE)),
    ("linear", ("--ctx-checkpoints", "0"), replace(STATE, most=0)),
    ("swa", ("--swa-full",), FULL),
])  # fmt: skip
def test_a_server_reuses_what_the_rule_says(start_llama, save_dir, shape, flags, rules):
    """Prompts that go on, are cut, repeat or are new, with answers, saves and restores in between."""
    dice = random.Random(3)  # noqa: S311 - the same prompts each time
    server = start_llama(*flags, model=gguf_path(shape), slots=1, save_dir=save_dir)
    memory, held, saved = rules.restored(0), array("i"), array("i")
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        for step in range(STEPS):
            if step % 10 == 5:
                client.post("/slots/0?action=save", json={"filename": "a.bin"}).raise_for_status()
                saved = held
            if saved and step % 10 in (7, 9):
                client.post("/slots/0?action=restore", json={"filename": "a.bin"}).raise_for_status()
                memory, held = rules.restored(len(saved)), saved
            kept = dice.choice(
                (len(held), len(held), max(len(held) - dice.choice((1, 5, 30)), 0), len(held) // 2)
            )
            prompt = held[: kept if len(held) < 1200 else 0] + prompt_of(step, dice.choice((1, 8, 40, 250)))
            if step % 10 == 2:
                prompt = prompt[: max(kept, 1)]  # nothing new
            shared = common_prefix(held, prompt)
            expected, is_sound = memory.reused(shared, len(prompt)), memory.is_sound(shared, len(prompt))
            cached, held = answered(client, prompt, dice, cache_prompt=is_sound)
            assert cached == expected, f"step {step}"
            memory = memory.after(shared if is_sound else 0, len(prompt), told=expected).grown(len(held))
            assert memory.is_firm(len(held), len(held) + 1)


FAR = {(1520, 1600): 1520, (1500, 1500): 1496, (1200, 1300): 984, (900, 1300): 0}
REUSED = {
    "plain: the common prefix but the last token": (
        lambda: computed(PLAIN, (0, 100)),
        {(0, 50): 0, (40, 60): 40, (100, 130): 100, (100, 100): 99, (0, 0): 0},
    ),
    "a state: where it ends, or from a checkpoint": (lambda: computed(STATE, (0, 1500)).grown(1520), FAR),
    "a window: if the tokens before the first new one are there": (
        lambda: computed(WINDOW, (0, 1500)).grown(1520),
        {(1520, 1600): 1520, (881, 1600): 881, (880, 1600): 0},
    ),
    "the first window: from a checkpoint": (lambda: computed(WINDOW, (0, 48)), {(48, 56): 43}),
    "a restored window: nothing": (lambda: WINDOW.restored(1000), {(1000, 1100): 0}),
    "a restored state": (
        lambda: STATE.restored(1000),
        {(1000, 1100): 1000, (999, 1100): 0, (1000, 1000): 0},
    ),
    "a restored full window": (lambda: FULL.restored(1000), {(1000, 1100): 1000, (999, 1100): 0}),
    "a restored full window that went on": (
        lambda: FULL.restored(1000).after(1000, 1100),
        {(1050, 1100): 1050, (900, 1100): 0},
    ),
    "a full window that is computed anew": (lambda: FULL.restored(1000).after(0, 500), {(300, 400): 300}),
}


@pytest.mark.parametrize("name", REUSED)
def test_what_a_memory_reuses(name):
    memory, reused = REUSED[name]
    assert {prompt: memory().reused(*prompt) for prompt in reused} == reused


@pytest.mark.parametrize(("rules", "prompts", "starts", "lie_at"), [
    (STATE, [(0, 48)], (), [44]),  # before the last tokens of a prompt
    (STATE, [(0, 1500)], (), [984, 1496]),
    (STATE, [(0, 4)], (), []),
    (replace(STATE, most=0), [(0, 1500)], (), []),
    (STATE, [(0, 1200)], (10, 300, 700), [10, 684, 700, 1196]),  # where the last user message begins
    (replace(STATE, spacing=200), [(0, 1200)], (10, 100, 300, 700), [10, 300, 684, 700, 1196]),  # far apart
    # Old ones make room.
    (replace(STATE, most=3, spacing=100), [(0, 500), (500, 550), (550, 900)], (), [496, 550, 896]),
    (STATE, [(0, 100), (98, 99)], (), [96]),  # one replaces that at its place
])  # fmt: skip
def test_where_checkpoints_lie(rules, prompts, starts, lie_at):
    assert made(computed(rules, *prompts, starts=starts)) == lie_at


def test_what_a_memory_holds_and_whether_files_bring_it_back():
    assert computed(PLAIN, (0, 100)).grown(150) == PLAIN.restored(150) == PLAIN.lost(150)
    assert WINDOW.cells == 768
    assert computed(WINDOW, (0, 1500)).grown(1520).oldest == 752
    assert (WINDOW.can_restore, STATE.can_restore, FULL.can_restore) == (False, True, True)


def test_a_restored_full_window_is_sound_only_as_a_whole():
    cases = {(1000, 1100): True, (999, 1100): False, (1000, 1000): False, (0, 0): False}
    assert {each: FULL.restored(1000).is_sound(*each) for each in cases} == cases
    assert PLAIN.restored(1000).is_sound(0, 0), "a prompt of unknown length"


def test_what_is_not_known_is_not_firm():
    for rules in (WINDOW, STATE):
        memory = rules.lost(300)
        assert not memory.is_firm(200, 250)
        assert memory.is_firm(0, 250)
        assert memory.after(0, 250).is_firm(200, 250)
        assert not memory.after(200, 250, told=150).is_firm(200, 260)
        assert memory.after(200, 250, told=0).is_firm(200, 260)
        assert memory.grown(200) == rules.lost(200)
        assert rules.lost(0).is_known
    assert STATE.lost(300).is_firm(300, 301)
    assert not replace(STATE, is_sure=False).restored(300).is_firm(300, 301)
    assert not SlotMemory(WINDOW, 300, is_known=False).is_firm(300, 301)


@pytest.mark.parametrize("rules", [WINDOW, STATE])
def test_a_prompt_that_is_computed_whole_leaves_a_checkpoint_of_one_token(rules):
    unknown = rules.lost(300)
    assert not unknown.is_sound(1, 250)
    assert not unknown.is_sound(1, 0)
    left = unknown.after(0, 900)
    assert not left.is_sound(1, 250)
    assert left.is_sound(0, 250)


def test_a_checkpoint_of_another_prompt_is_not_sound():
    """The server keeps that of `n + 1` tokens after a prompt that shares `n`."""
    memory = SlotMemory(STATE, 60, checkpoints=(Checkpoint(50, 49), Checkpoint(51, 50)))
    assert memory.is_sound(55, 250)
    cut = memory.after(50, 1500)
    assert [each.is_stale for each in cut.checkpoints][:2] == [False, True]
    assert not cut.is_sound(300, 400)
    assert not cut.is_sound(300, 0)
    assert cut.reused(300, 400) == 0


def test_what_the_server_says_corrects_the_rule():
    memory = computed(WINDOW, (0, 1500))
    assert memory.reused(1500, 1600) == 1500
    corrected = memory.after(1500, 1600, told=1495)  # from the checkpoint, for whatever reason
    assert (corrected.is_known, corrected.oldest) == (True, 1496 - 128)
    assert made(corrected) == [984, 1496, 1495, 1596]
    assert not memory.after(1500, 1600, told=700).is_known


@pytest.mark.parametrize(
    ("mark", "starts"), [((7, 8), (0, 4)), ((8,), (1, 5)), ((7, 9), (2,)), ((), ()), ((8, 7, 9, 1), ())]
)
def test_user_messages_begin_at_their_mark(mark, starts):
    assert user_starts(array("i", [7, 8, 7, 9, 7, 8]), mark) == starts


def by_the_servers_loop(cache, prompt, n_cache_reuse):
    """The loop of `update_slots` in tools/server/server-context.cpp of llama.cpp 0c1e570."""
    cache, prompt = list(cache), list(prompt)
    n_past = common_prefix(cache, prompt)
    if n_cache_reuse > 0:
        head_c = head_p = n_past
        while head_c < len(cache) and head_p < len(prompt):
            n_match = 0
            while (
                head_c + n_match < len(cache)
                and head_p + n_match < len(prompt)
                and cache[head_c + n_match] == prompt[head_p + n_match]
            ):
                n_match += 1
            if n_match >= n_cache_reuse:
                for i in range(n_match):
                    cache[head_p + i] = cache[head_c + i]
                    n_past += 1
                head_c += n_match
                head_p += n_match
            else:
                head_c += 1
    return n_past


# Ids whose bytes look alike, of surrogates, and beyond what a character can be.
IDS = st.sampled_from([0, 1, 2, 256, 65536, 65537, 0xD800, 0xDFFF, 0x10FFFF - 0x10000])
TOKENS = st.lists(IDS, max_size=40)


@st.composite
def edited(draw):
    """A content, and a prompt that lacks parts of it and has others."""
    parts = draw(st.lists(st.lists(IDS, min_size=1, max_size=12), max_size=8))
    kept = [part for part in parts if draw(st.booleans())]
    before = draw(TOKENS) if draw(st.booleans()) else []
    return [*chain.from_iterable(parts)], [*before, *chain.from_iterable(kept), *draw(TOKENS)]


@given(st.one_of(st.tuples(TOKENS, TOKENS), edited()), st.integers(0, 6))
@example(([5, *range(20), 6], [*range(20), 6]), 4)
def test_what_is_moved_is_what_the_server_moves(content_and_prompt, chunk):
    content, prompt = content_and_prompt
    expected = by_the_servers_loop(content, prompt, chunk)
    assert reusable(array("i", content), array("i", prompt), chunk) == expected


@pytest.mark.parametrize("id_", [0x10FFFF, 2**31 - 1])
def test_ids_of_no_model_are_not_moved(id_):
    held = array("i", [7, id_, *range(9)])
    assert reusable(held, array("i", [7, *range(9)]), 4) == 1


def test_a_search_takes_its_time_once():
    held, prompt = array("i", [1, 2] * 50_000), array("i", [1, 3] + [2] * 50_000)
    start = time.process_time()
    assert reusable(held, prompt, 256) == 1
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    ("uses", "exact"),
    [
        ([(0, False)], True),
        ([(0, False), (50, False)], True),
        ([(0, False), (50, True)], False),
        ([(0, False), (50, True), (90, False)], False),
        ([(0, False), (50, True), (90, True), (50, False)], True),
        ([(0, False), (50, True), (51, False), (50, False)], True),
        ([(50, False)], False),
    ],
)
def test_an_answer_is_exact_up_to_what_was_moved(uses, exact):
    """Of a slot whose file was restored: what lies there may have been moved before."""
    memory = replace(PLAIN, chunk=16).restored(100)
    for shared, moves in uses:
        memory = memory.used_by(shared, moves=moves)
    assert (memory.exact == math.inf) is exact
    assert PLAIN.restored(100).used_by(100, moves=False).exact == math.inf
