"""Logprobs of prompts, compared with a full pass of transformers."""

from __future__ import annotations

import pytest
import torch

from engine_adapter.torch_engine.model import load_model
from engine_adapter.torch_engine.requests import PromptScores, Scheduled
from engine_adapter.torch_engine.scheduler import SCORED_TOKENS
from tests.engine_adapter.torch_engine.engine_world import Reference, served, write_config_model

PROMPT = [2 + i % 90 for i in range(SCORED_TOKENS + 50)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_config_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(directory):
    module = Reference(directory).module
    with torch.inference_mode():
        logprobs = module(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return logprobs[:-1]


def scores_of(answer):
    parts = [output for output in answer.outputs if isinstance(output, PromptScores)]
    return [score for part in parts for score in part.scores]


def compare(scores, expected):
    assert len(scores) == len(PROMPT) - 1
    chosen = expected.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([score for score, _ in scores]), chosen, atol=1e-4, rtol=1e-4)
    best = expected.topk(2)
    assert [[i for i, _ in top] for _, top in scores] == best.indices.tolist()


@pytest.mark.parametrize("chunk", [7, 512])
def test_they_are_the_models(directory, expected, chunk):
    with served(load_model(str(directory)), prefill_chunk=chunk, kv_blocks=128) as world:
        plain = world.tokens(PROMPT, 4)
        answer = world.ask(PROMPT, 4, prompt_logprobs=2).wait()
        beside = [world.ask(PROMPT, 4), world.ask(PROMPT, 4, prompt_logprobs=2), world.ask([5, 6, 7], 4)]
        compare(scores_of(answer), expected)
        assert answer.tokens == plain
        for each in beside:
            each.wait()
        compare(scores_of(beside[1]), expected)
        assert beside[0].tokens == plain


def test_such_a_prompt_is_computed_whole_and_reused_by_others(directory):
    with served(load_model(str(directory)), kv_blocks=128) as world:
        first = world.ask(PROMPT, 1, prompt_logprobs=0).wait()
        again = world.ask(PROMPT, 1, prompt_logprobs=0).wait()
        assert [output.cached_tokens for output in again.outputs if isinstance(output, Scheduled)] == [0]
        assert [top for _, top in scores_of(again)] == [()] * (len(PROMPT) - 1)
        assert first.cached == 0
        assert scores_of(world.ask([5], 2, prompt_logprobs=1).wait()) == []
        assert world.ask(PROMPT, 1).wait().cached == (len(PROMPT) - 1) // 4 * 4


def test_a_preempted_prompt_is_scored_once(directory, expected):
    with served(load_model(str(directory)), kv_blocks=60) as world:
        answers = [world.ask(PROMPT, 30, prompt_logprobs=2), world.ask([9] * 20, 60)]
        for answer in answers:
            answer.wait()
        compare(scores_of(answers[0]), expected)
