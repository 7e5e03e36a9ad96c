from __future__ import annotations

from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine_adapter.torch_engine.model import PADDING_TOKENS, Runner
from engine_adapter.torch_engine.requests import GenerationRequest, RequestRefused, SamplingParams
from engine_adapter.torch_engine.sampling import Sampler
from engine_adapter.torch_engine.scheduler import Active, Scheduler, check_request
from tests.engine_adapter.torch_engine.kv_world import World


class Desk:
    """A scheduler over a cache with checked memory. `step` computes the plan."""

    def __init__(self, blocks=16, max_num_seqs=8, prefill_chunk=8):
        self.world = World(blocks)
        self.scheduler = Scheduler(self.world.cache, max_num_seqs=max_num_seqs, prefill_chunk=prefill_chunk)

    def add(self, name, tokens, priority=0):
        params = SamplingParams(temperature=0.0)
        request = GenerationRequest(name, array("i", tokens), params, priority=priority)
        sampler = Sampler(request, ends=frozenset(), vocab_size=10, seed=0)
        active = Active(request, lambda outputs: None, sampler, ends=frozenset(), limit=100)
        self.scheduler.add(active)
        return active

    @property
    def running(self):
        return [active.request.request_id for active in self.scheduler.running]

    @property
    def waiting(self):
        return [active.request.request_id for active in self.scheduler.waiting]

    def step(self, token=7):
        """Computes a step; returns (name, tokens, first) of each item. Completed requests get `token`."""
        planned = self.scheduler.plan()
        told = [(each.request.request_id, each.sequence.count, not each.scheduled) for each in planned]
        for active in planned:
            completes = active.completes
            active.scheduled = True
            self.world.compute(active.sequence, active.sequence.count)
            if completes:
                active.accept(token)
        self.world.running = [active.sequence for active in self.scheduler.running]
        self.world.check()
        return told


def tokens(length, start=0):
    return list(range(start, start + length))


def test_prompts_run_in_chunks_first_come_first_served_beside_decodes():
    desk = Desk()
    desk.add("a", tokens(11))
    desk.add("b", tokens(6, 100))
    assert desk.step() == [("a", 8, True)]
    assert desk.step() == [("a", 3, False), ("b", 5, True)]
    assert desk.step() == [("b", 1, False), ("a", 1, False)]
    assert desk.step() == [("b", 1, False), ("a", 1, False)]


def test_prompts_run_in_halved_chunks_while_others_decode():
    desk = Desk()
    desk.add("a", tokens(3))
    desk.step()
    desk.add("b", tokens(10, 100))
    assert desk.step() == [("a", 1, False), ("b", 4, True)]
    desk.scheduler.remove(desk.scheduler.running[0])
    assert desk.step() == [("b", 6, False)]


def test_single_tokens_come_first_and_the_shortest_sequence_of_them():
    desk = Desk(prefill_chunk=20)
    desk.add("a", tokens(9))
    desk.step()
    desk.scheduler.remove(desk.scheduler.running[0])
    desk.add("long", tokens(6, 50))
    desk.add("cached", tokens(9))
    assert desk.step() == [("cached", 1, True), ("long", 6, True)]


def test_no_more_than_max_num_seqs_run():
    desk = Desk(max_num_seqs=1)
    first = desk.add("a", tokens(3))
    desk.add("b", tokens(3, 50))
    assert desk.step() == [("a", 3, True)]
    assert desk.step() == [("a", 1, False)]
    desk.scheduler.remove(first)
    assert desk.step() == [("b", 3, True)]


def test_the_youngest_gives_way_and_comes_back_first():
    desk = Desk(blocks=5)
    desk.add("a", tokens(7))
    desk.add("b", tokens(3, 50))
    desk.add("c", tokens(3, 90))
    for _ in range(10):
        assert "a" in [name for name, _, _ in desk.step()]
    assert desk.scheduler.preemptions > 0
    assert (desk.running + desk.waiting, "c" in desk.waiting) == (["a", "b", "c"], True)


def test_the_lowest_priority_value_runs_first():
    desk = Desk(max_num_seqs=1)
    desk.add("running", tokens(3))
    desk.step()
    for name, priority in (("a", 0), ("later", 5), ("b", 0), ("first", -1)):
        desk.add(name, tokens(3), priority=priority)
    assert desk.waiting == ["first", "a", "b", "later"]
    assert desk.step() == [("running", 1, False)]  # a running request is not stopped


def test_the_highest_priority_value_gives_way():
    desk = Desk(blocks=5)
    desk.add("a", tokens(7), priority=1)
    desk.add("b", tokens(3, 50))
    while not desk.scheduler.preemptions:
        desk.step()
    assert desk.running == ["b"]


def test_a_preempted_request_is_recomputed_and_not_first_again():
    desk = Desk(blocks=5, prefill_chunk=16)
    first, second = desk.add("a", tokens(7)), desk.add("b", tokens(6, 50))
    desk.step()
    while second in desk.scheduler.running:
        desk.step()
    desk.scheduler.remove(first)
    assert len(second.sequence.tokens) == 9
    assert desk.step() == [("b", 1, False)]  # the rest is still cached


FAKE = 4096
ROWS = {7: torch.zeros(2, 256)}


def request(tokens, extra_ids=None, embeddings=None, **params):
    extras = None if extra_ids is None else array("Q", extra_ids)
    return GenerationRequest("r", array("i", tokens), SamplingParams(**params), extras, embeddings or {})


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        (request([]), "prompt", "the prompt has 0 tokens"),
        (request([1] * 10), "prompt", "10 tokens; with one to generate, 1 to 9 fit"),
        (request([1], stop_token_ids=(5, FAKE)), "stop_token_ids[1]", "is 4096, outside the vocabulary of"),
        (request([1], stop_token_ids=(-1,)), "stop_token_ids[0]", "is -1, outside the vocabulary"),
        (request([1], logit_bias=((FAKE, 1.0),)), "logit_bias[4096]", "outside the vocabulary of 4096"),
        (request([1, -2]), "prompt[1]", "is -2: no text"),
        (request([1, FAKE]), "prompt[1]", "is 4096: no text, and no row that extra id 0 has"),
        (request([1, FAKE], [0, 8], ROWS), "prompt[1]", "no row that extra id 8 has"),
        (request([1, FAKE + 2], [0, 7], ROWS), "prompt[1]", "is 4098: no text, and no row that extra id 7"),
    ],
)
def test_refusals_name_the_field_and_the_reason(asked, param, message):
    with pytest.raises(RequestRefused, match=message) as refused:
        check_request(asked, FAKE, 10)
    assert refused.value.param == param


# --- which sequences of a step attend together ----------------------------------------------------------


SIZE = 4
LONG = PADDING_TOKENS // SIZE + 2


@pytest.mark.parametrize(
    ("counts", "blocks", "most_blocks", "groups"),
    [
        ([1, 1, 1], [1, 2, 2], 99, [(0, 2)]),
        ([1, 1, 3, 1], [1, 1, 1, 1], 99, [(0, 1), (2, 2), (3, 3)]),
        ([1, 1], [1, LONG - 1], 9999, [(0, 1)]),
        ([1, 1, 1], [1, 1, LONG], 9999, [(0, 1), (2, 2)]),
        ([1] * 5, [1] * 5, 2, [(0, 1), (2, 3), (4, 4)]),
    ],
    ids=["similar", "a prompt between", "some padding", "much padding", "the CPU's cache"],
)
def test_single_tokens_of_similar_sequences_attend_together(counts, blocks, most_blocks, groups):
    runner = SimpleNamespace(_size=SIZE, _most_blocks=most_blocks)
    rows = SimpleNamespace(counts=np.array(counts), tables=[range(each) for each in blocks])
    assert Runner._groups(runner, rows) == groups
