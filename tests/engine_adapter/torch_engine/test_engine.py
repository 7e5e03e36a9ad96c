from __future__ import annotations

import dataclasses
import threading
from array import array
from contextlib import contextmanager

import pytest
import torch

from engine_adapter.errors import EngineUnavailable
from engine_adapter.torch_engine.engine import MAX_FAILED_STEPS, EngineCore, is_fatal
from engine_adapter.torch_engine.model import load_model
from engine_adapter.torch_engine.requests import (
    GenerationRequest,
    PromptScores,
    SamplingParams,
    Scheduled,
    Token,
)
from engine_adapter.torch_engine.scheduler import SCORED_TOKENS
from engine_adapter.torch_engine.serve import EmbeddedOptions
from engine_adapter.types import BlocksStored, KvTarget, Tier
from tests.engine_adapter.torch_engine.engine_world import (
    CONFIGS,
    VOCAB,
    Reference,
    served,
    write_config_model,
)
from tests.engine_adapter.torch_engine.kv_integrity import violations


def prompt_of(length, seed=0):
    return [2 + (31 * index + 7 * index * index + 17 * seed) % (VOCAB - 2) for index in range(length)]


@contextmanager
def held_up(world):
    """Holds the engine thread, so that requests made within start together."""
    gate = threading.Event()
    blocked = world.engine.call(lambda cache: gate.wait(10))
    yield
    gate.set()
    blocked.result(timeout=10)


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    """(our model, transformers' own) of one kind."""
    directory = write_config_model(request.param, tmp_path_factory.mktemp(request.param))
    return load_model(str(directory)), Reference(directory)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_config_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(llama):
    return load_model(str(llama))


@pytest.fixture(scope="module")
def reference(llama):
    return Reference(llama)


@pytest.fixture
def world(model):
    with served(model) as world:
        yield world


@pytest.mark.parametrize("chunk", [3, 256])
def test_greedy_is_generate_with_and_without_cache(pair, chunk):
    model, reference = pair
    prompt = prompt_of(41)
    expected = reference.greedy(prompt, 12)
    with served(model, prefill_chunk=chunk) as world:
        cold, warm = world.ask(prompt, 12).wait(), world.ask(prompt, 12).wait()
        assert (cold.tokens, cold.cached) == (expected, 0)
        assert (warm.tokens, warm.cached) == (expected, 40)
        longer = prompt + expected + prompt_of(9, seed=1)
        turn = world.ask(longer, 6).wait()
        assert turn.tokens == reference.greedy(longer, 6)
        assert turn.cached == (41 + 12 - 1) // 4 * 4  # the last token's KV was never computed


@pytest.mark.parametrize("chunk", [5, 64])
def test_greedy_is_generate_in_a_batch(pair, chunk):
    model, reference = pair
    shared = prompt_of(17)
    prompts = [shared + prompt_of(length, seed=length) for length in (1, 5, 13, 30)] + [prompt_of(3, seed=9)]
    with served(model, prefill_chunk=chunk, max_num_seqs=3) as world:
        answers = [world.ask(prompt, 10) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.wait().tokens == reference.greedy(prompt, 10)


def test_greedy_is_generate_after_offload_and_restore(pair):
    model, reference = pair
    prompt = prompt_of(30)
    expected = reference.greedy(prompt, 9)
    with served(model, host_cache_bytes=64 * model.block_bytes(4)) as world:
        assert world.tokens(prompt, 9) == expected
        told = len(world.batches)
        assert world.operate("offload", prompt).moved == 7
        assert len(world.batches) == told + 1  # before the operation returns
        again = world.ask(prompt, 9).wait()  # the prompt restores it
        assert (again.tokens, again.cached) == (expected, 28)
        assert world.operate("offload").moved == 9
        assert world.operate("restore", prompt).moved == 7
        assert world.tokens(prompt, 9) == expected
        assert world.stats()["blocks"] == {"evicted": 0, "offloaded": 16, "restored": 14}


def test_greedy_is_generate_through_preemption_and_eviction(pair):
    model, reference = pair
    prompts = [prompt_of(14, seed=seed) for seed in range(4)]
    with served(model, kv_blocks=14, prefill_chunk=8, host_cache_bytes=5 * model.block_bytes(4)) as world:
        answers = [world.ask(prompt, 24) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.wait().tokens == reference.greedy(prompt, 24)
        assert world.engine.counters.preemptions > 0
        assert world.stats()["blocks"]["evicted"] > 0


def test_fake_ids_stand_for_rows_of_their_table(model, reference):
    tables = {7: torch.randn(5, 32, generator=torch.Generator().manual_seed(1)), 8: torch.randn(5, 32)}
    text = prompt_of(6)
    tokens = [VOCAB + 4, VOCAB + 1, VOCAB, VOCAB + 2, *text]
    extra_ids = [7, 7, 8, 7, *[0] * 6]
    embed = reference.module.get_input_embeddings()
    rows = tables[7][[4, 1, 0, 2]]
    rows[2] = tables[8][0]
    expected = reference.greedy(tokens, 8, torch.cat([rows, embed(torch.tensor(text))]).detach())
    with served(model, prefill_chunk=3) as world:
        first = world.ask(tokens, 8, extra_ids=extra_ids, embeddings=tables).wait()
        again = world.ask(tokens, 8, extra_ids=extra_ids, embeddings=tables).wait()
        other = world.ask(tokens, 8, extra_ids=[8] * 4 + [0] * 6, embeddings=tables).wait()
    assert (first.tokens, first.cached) == (expected, 0)
    assert (again.tokens, again.cached) == (expected, 8)
    assert other.cached == 0


def test_a_burst_of_one_prompt_computes_it_once(model):
    with served(model, prefill_chunk=16) as world:
        with held_up(world):
            answers = [world.ask(prompt_of(33), 4) for _ in range(6)]
        assert [answer.wait().cached for answer in answers] == [0] + [32] * 5
        assert len({tuple(answer.tokens) for answer in answers}) == 1


def test_events_of_a_step_come_before_its_tokens_in_runs(model):
    prompt = prompt_of(17)
    with served(model, prefill_chunk=8) as world:
        with held_up(world):
            answer = world.ask(prompt, 4)
            order = answer.outputs
            world.engine._publish = order.append
        answer.wait()
    kinds = [type(each) for each in order]
    assert kinds[:4] == [Scheduled, list, list, Token]
    stored = [event for each in order if isinstance(each, list) for event in each]
    assert [len(event.hashes) for event in stored[:2]] == [2, 2]
    assert all(isinstance(event, BlocksStored) and event.tier is Tier.GPU for event in stored)
    assert (stored[0].parent, stored[1].parent) == (None, stored[0].hashes[-1])
    assert list(stored[0].token_ids + stored[1].token_ids) == prompt[:16]


def test_stop_tokens_and_lengths(world):
    free = world.tokens(prompt_of(9), 12)
    stop = free[5]
    first = free.index(stop)
    stopped = world.ask(prompt_of(9), 12, stop_token_ids=(stop,)).wait()
    assert (stopped.tokens, stopped.finished.reason) == (free[: first + 1], "stop")
    later = world.ask(prompt_of(9), 12, stop_token_ids=(stop,), min_tokens=first + 2).wait()
    assert len(later.tokens) >= first + 2
    assert stop not in later.tokens[: first + 1]
    whole = world.ask(prompt_of(250), None, min_tokens=0).wait()
    assert (len(whole.tokens), whole.finished.reason) == (6, "length")


def test_the_end_token_stops_unless_ignored(world):
    free = world.tokens(prompt_of(9), 12)
    ending = dataclasses.replace(world.model, eos_token_ids=frozenset({free[5]}))
    with served(ending) as other:
        ended = other.ask(prompt_of(9), 12, ignore_eos=False).wait()
        assert (ended.tokens, ended.finished.reason) == (free[: free.index(free[5]) + 1], "stop")
        assert other.tokens(prompt_of(9), 12) == free


POISON = 1  # the first token of a prompt whose steps fail
POISONED = [POISON, *prompt_of(6)]


def fail_on_poison(world, error, times=10**9):
    """Steps with a poisoned prompt raise `error`, at most `times` times."""
    run = world.engine._runner.run
    left = iter(range(times))

    def poisoned(work):
        if any(item.tokens[0] == POISON for item in work) and next(left, None) is not None:
            raise error
        return run(work)

    world.engine._runner.run = poisoned


def test_only_the_request_that_fails_ends_and_the_others_get_their_tokens(world, reference, caplog):
    sampled = {"temperature": 1.0, "seed": 3, "presence_penalty": 1.0}
    alone = world.tokens(prompt_of(11, seed=2), **sampled)
    with served(world.model) as other:
        fail_on_poison(other, RuntimeError("out of luck"))
        with held_up(other):
            greedy, drawn = other.ask(prompt_of(9)), other.ask(prompt_of(11, seed=2), **sampled)
            broken = other.ask(POISONED)
        assert broken.wait().finished.reason == "error"
        assert broken.finished.message == "RuntimeError: out of luck"
        assert greedy.wait().tokens == reference.greedy(prompt_of(9), 8)
        assert drawn.wait().tokens == alone
        assert other.engine.counters.finished == {"error": 1, "length": 2}
    assert "running them one by one" in caplog.text


def test_a_step_that_fails_once_costs_nobody_anything(world, reference):
    fail_on_poison(world, torch.OutOfMemoryError("CUDA out of memory"), times=1)
    with held_up(world):
        answers = [world.ask(prompt) for prompt in (prompt_of(9), POISONED)]
    for prompt, answer in zip((prompt_of(9), POISONED), answers, strict=True):
        assert answer.wait().tokens == reference.greedy(prompt, 8)


def test_what_is_no_number_ends_its_own_request_and_never_reaches_another(model, reference):
    rows = {5: torch.full((1, 32), float("nan"))}
    with served(model, kv_blocks=16) as world:
        with held_up(world):
            good = world.ask(prompt_of(9))
            broken = [
                world.ask([VOCAB] * length, extra_ids=[5] * length, embeddings=rows, temperature=temperature)
                for length, temperature in ((17, 0.0), (16, 1.0))
            ]
        for answer in broken:
            assert "embeddings lead to scores that are no numbers" in answer.wait().finished.message
        for _ in range(MAX_FAILED_STEPS + 1):  # the client is at fault, not the engine
            refused = world.ask([VOCAB], extra_ids=[5], embeddings=rows).wait()
            assert (refused.finished.reason, refused.finished.param) == ("refused", "prompt")
        assert good.wait().tokens == reference.greedy(prompt_of(9), 8)
        world.operate("flush")
        with held_up(world):  # these two get the blocks of the broken ones
            answers = [world.ask(prompt_of(length)) for length in (5, 6)]
        for length, answer in zip((5, 6), answers, strict=True):
            assert answer.wait().tokens == reference.greedy(prompt_of(length), 8)


@pytest.mark.parametrize("verb", ["copy_to_host", "copy_to_gpu"])
def test_a_copy_that_fails_costs_its_request_and_no_other_kv(model, reference, verb):
    prompts = [prompt_of(33, seed=seed) for seed in range(3)]
    with served(model, kv_blocks=16, host_cache_bytes=32 * model.block_bytes(4)) as world:
        for prompt in prompts[:2]:
            world.tokens(prompt)
        storage = world.engine._cache.tree._copier
        copy = getattr(storage, verb)

        def fail(*slots):
            setattr(storage, verb, copy)
            raise torch.OutOfMemoryError("CUDA out of memory")

        setattr(storage, verb, fail)
        assert world.ask(prompts[0]).wait().finished.reason == "error"
        for prompt in prompts:
            assert world.tokens(prompt) == reference.greedy(prompt, 8)
        assert violations(world.engine._cache, []) == []


def test_a_broken_device_ends_the_engine_and_says_whose_step_it_was(model, caplog):
    told = "CUDA error: device-side assert triggered"
    with served(model, max_num_seqs=2) as world:
        fail_on_poison(
            world, torch.AcceleratorError(f"{told}\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1")
        )
        with held_up(world):
            both = [world.ask(prompt_of(9), 100), world.ask(POISONED)]
            waiting = world.ask(prompt_of(5))
        assert [answer.wait().finished.reason for answer in both] == ["error", "error"]
        assert waiting.wait().finished.reason == "cancelled"
        assert waiting.finished.message == f"the engine died: AcceleratorError: {told}"
        assert world.engine.wait() == both[0].finished.message == f"AcceleratorError: {told}"
        assert not world.engine.alive
    assert "the engine died" in caplog.text


@pytest.mark.parametrize("where", ["an operation", "a copy"])
def test_a_device_error_beside_the_steps_ends_the_engine(model, where):

    def fail(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with served(model, kv_blocks=16, host_cache_bytes=32 * model.block_bytes(4)) as world:
        world.tokens(prompt_of(33))
        if where == "an operation":
            with pytest.raises(RuntimeError, match="illegal memory access"):
                world.call(fail)
        else:
            world.engine._cache.tree._copier.copy_to_host = fail
            assert world.ask(prompt_of(33, seed=1)).wait().finished.reason == "error"
        assert "illegal memory access" in world.engine.wait()


def test_an_engine_that_fails_at_every_step_ends(world, reference):
    fail_on_poison(world, RuntimeError("out of luck"))
    for _ in range(MAX_FAILED_STEPS - 1):
        world.ask(POISONED).wait()
    assert world.tokens(prompt_of(9)) == reference.greedy(prompt_of(9), 8)  # a good step resets the count
    for _ in range(MAX_FAILED_STEPS):
        assert world.ask(POISONED).wait().finished.reason == "error"
    assert f"{MAX_FAILED_STEPS} steps in a row failed" in world.engine.wait()


def test_an_owner_that_fails_loses_its_own_request_only(world, reference, caplog):
    answer = world.ask(prompt_of(9), 8)

    def explode(outputs):
        raise RuntimeError("owner")

    world.engine.submit(
        GenerationRequest("bad", array("i", prompt_of(30)), SamplingParams(max_tokens=100)), explode
    )
    assert answer.wait().tokens == reference.greedy(prompt_of(9), 8)
    world.call(lambda cache: None)
    world.call(lambda cache: None)
    assert "bad" not in world.engine._in_flight
    assert "the callback of a request failed" in caplog.text


def test_a_dead_thread_leaves_nobody_waiting(world, caplog):

    def die():
        raise RuntimeError("bug")

    world.engine._scheduler.plan = die
    answer = world.ask(prompt_of(9)).wait()
    assert answer.finished.reason == "cancelled"
    assert answer.finished.message == "the engine died: RuntimeError: bug"
    assert world.engine.wait() == "RuntimeError: bug"
    assert not world.engine.alive
    with pytest.raises(EngineUnavailable):
        world.ask(prompt_of(9))
    with pytest.raises(EngineUnavailable):
        world.engine.call(lambda cache: None)
    world.engine.cancel(answer.id)
    assert "the engine died" in caplog.text


def test_without_a_size_the_cache_is_sized_by_the_free_memory(model, monkeypatch):
    free = "engine_adapter.torch_engine.engine.available_bytes"
    monkeypatch.setattr(free, lambda: 40 * model.block_bytes(4))
    engine = EngineCore(model, EmbeddedOptions(tokens_per_block=4), lambda _events: None)
    assert (engine.gpu_blocks, engine.max_model_len) == (10, 40)


def test_pins_can_leave_a_request_without_room(model):
    with served(model, kv_blocks=10) as world:
        world.tokens(prompt_of(32), 1)
        target = KvTarget(array("i", prompt_of(32)))
        assert world.call(lambda cache: cache.pin(target, 1e9, 0.0)).blocks == 8
        lost = world.ask(prompt_of(20, seed=5)).wait()
        assert lost.finished.reason == "cancelled"  # another engine may have room
        assert "beside 8 pinned blocks" in lost.finished.message
        assert world.ask(prompt_of(5, seed=6), 2).wait().finished.reason == "length"


def test_values_that_are_no_numbers_in_the_middle_of_a_prompt_end_the_request(model, reference):
    """Only the first chunk of this prompt has such values. They are hidden from the attention of others, so
    the answer's scores are numbers."""
    with served(model, kv_blocks=16, prefill_chunk=4) as world:
        good = world.ask(prompt_of(9))
        run, poison = model.module.model.embed_tokens.forward, 7
        model.module.model.embed_tokens.forward = lambda ids: run(ids).masked_fill(
            (ids == poison)[..., None], float("nan")
        )
        try:
            bad = world.ask([poison, *[token for token in prompt_of(20) if token != poison]])
            assert bad.wait().finished.reason == "error"
            assert "no numbers" in bad.finished.message
            assert good.wait().tokens == reference.greedy(prompt_of(9), 8)
        finally:
            model.module.model.embed_tokens.forward = run
        keys = [block.token_ids[0] for block in world.call(lambda cache: cache.snapshot())]
        assert poison not in keys


def test_errors_of_the_device_are_fatal():
    assert is_fatal(RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"))
    assert not is_fatal(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert not is_fatal(ValueError("CUDA error"))


# --- logprobs of prompts ------------------------------------------------------------------------------

SCORED = [2 + i % 90 for i in range(SCORED_TOKENS + 50)]


@pytest.fixture
def expected(reference):
    with torch.inference_mode():
        return reference.module(torch.tensor([SCORED])).logits[0].log_softmax(-1)[:-1]


def scores_of(answer):
    parts = [output for output in answer.wait().outputs if isinstance(output, PromptScores)]
    return [score for part in parts for score in part.scores]


def compare(scores, expected):
    assert len(scores) == len(SCORED) - 1
    chosen = expected.gather(1, torch.tensor(SCORED[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([score for score, _ in scores]), chosen, atol=1e-4, rtol=1e-4)
    best = expected.topk(2)
    assert [[i for i, _ in top] for _, top in scores] == best.indices.tolist()


@pytest.mark.parametrize("chunk", [7, 512])
def test_scores_of_a_prompt_are_the_models(model, expected, chunk):
    with served(model, prefill_chunk=chunk, kv_blocks=128) as world:
        plain = world.tokens(SCORED, 4)
        answer = world.ask(SCORED, 4, prompt_logprobs=2)
        compare(scores_of(answer), expected)
        assert answer.tokens == plain
        beside = [world.ask(SCORED, 4), world.ask(SCORED, 4, prompt_logprobs=2), world.ask([5, 6, 7], 4)]
        compare(scores_of(beside[1]), expected)
        assert beside[0].wait().tokens == plain


def test_a_prompt_that_is_scored_is_computed_whole_and_reused_by_others(model):
    with served(model, kv_blocks=128) as world:
        for _ in range(2):
            scored = world.ask(SCORED, 1, prompt_logprobs=0)
            assert [top for _, top in scores_of(scored)] == [()] * (len(SCORED) - 1)
            assert scored.cached == 0
        assert scores_of(world.ask([5], 2, prompt_logprobs=1)) == []
        assert world.ask(SCORED, 1).wait().cached == (len(SCORED) - 1) // 4 * 4


def test_a_preempted_prompt_is_scored_once(model, expected):
    with served(model, kv_blocks=60) as world:
        scored, beside = world.ask(SCORED, 30, prompt_logprobs=2), world.ask([9] * 20, 60)
        compare(scores_of(scored), expected)
        beside.wait()
