from __future__ import annotations

from array import array

import pytest
import torch

from engine_adapter.torch_engine.requests import GenerationRequest, RequestRefused, SamplingParams
from engine_adapter.torch_engine.scheduler import check_request
from tests.engine_adapter.torch_engine.engine_world import tiny

FAKE = 4096
ROWS = {7: torch.zeros(2, 256)}


def request(tokens, extra_ids=None, embeddings=None, **params):
    extras = None if extra_ids is None else array("Q", extra_ids)
    return GenerationRequest("r", array("i", tokens), SamplingParams(**params), extras, embeddings or {})


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        (request([]), "prompt", "empty"),
        (request([1] * 10), "prompt", "10 tokens; with one to generate, at most 10 fit"),
        (request([1], max_tokens=0), "max_tokens", "below 1"),
        (
            request([1], stop_token_ids=(5, FAKE)),
            "stop_token_ids[1]",
            "is 4096, outside the vocabulary of 4096",
        ),
        (request([1], stop_token_ids=(-1,)), "stop_token_ids[0]", "is -1, outside the vocabulary"),
        (request([1], stop_token_ids=tuple(range(FAKE)), min_tokens=1), "stop_token_ids", "whole vocabulary"),
        (request([1], logit_bias=((FAKE, 1.0),)), "logit_bias[4096]", "outside the vocabulary of 4096"),
        (request([1, -2]), "prompt", r"prompt\[1\] is negative"),
        (request([1, 2], [0]), "extra_ids", "1 entries for 2"),
        (request([1, FAKE]), "prompt[1]", "which extra id 0 does not have"),
        (request([1, FAKE], [0, 8], ROWS), "prompt[1]", "extra id 8 does not have"),
        (request([1, FAKE + 2], [0, 7], ROWS), "prompt[1]", "row 2, which extra id 7"),
        (request([FAKE], [7], {7: torch.zeros(2, 9)}), "prompt", r"shape \[2, 9\]; \[rows, 256\]"),
    ],
)
def test_refusals_name_the_field_and_the_reason(asked, param, message):
    with pytest.raises(RequestRefused, match=message) as refused:
        check_request(asked, tiny(), 10)
    assert refused.value.param == param


def test_what_can_run_is_taken():
    check_request(request([1] * 9), tiny(), 10)
    check_request(request([1], stop_token_ids=tuple(range(FAKE))), tiny(), 10)
    check_request(request([FAKE, FAKE + 1, 5], [7, 7, 0], ROWS), tiny(), 10)
