"""Checks whether a request can run, before it is queued."""

from __future__ import annotations

import numpy as np

from engine_adapter.torch_engine.requests import GenerationRequest, RequestRefused, SamplingParams
from engine_adapter.torch_engine.runner import LoadedModel


def check_request(request: GenerationRequest, model: LoadedModel, max_model_len: int) -> None:
    """Raises RequestRefused for a request that can never run; it names the field."""
    tokens = np.array(request.token_ids, dtype=np.int64)
    if not len(tokens):
        raise RequestRefused("the prompt is empty", param="prompt")
    if len(tokens) >= max_model_len:
        raise RequestRefused(
            f"the prompt has {len(tokens)} tokens; with one to generate, at most {max_model_len} fit",
            param="prompt",
        )
    if request.sampling.max_tokens is not None and request.sampling.max_tokens < 1:
        raise RequestRefused("max_tokens is below 1", param="max_tokens")
    if tokens.min() < 0:
        raise RequestRefused(f"prompt[{tokens.argmin()}] is negative", param="prompt")
    if request.extra_ids is not None and len(request.extra_ids) != len(tokens):
        raise RequestRefused(
            f"extra_ids has {len(request.extra_ids)} entries for {len(tokens)} prompt tokens",
            param="extra_ids",
        )
    _check_stop_tokens(request.sampling, model)
    for token, _ in request.sampling.logit_bias:
        check_token_id(token, f"logit_bias[{token}]", model.vocab_size)
    _check_embeddings(request, model)
    fake = np.flatnonzero(tokens >= model.vocab_size)
    if len(fake) and request.sampling.prompt_logprobs is not None:
        raise RequestRefused("embeddings in a prompt have no logprobs", param="logprobs")
    for index in fake.tolist():
        _check_row(request, index, int(tokens[index]) - model.vocab_size)


def _check_stop_tokens(sampling: SamplingParams, model: LoadedModel) -> None:
    for index, token in enumerate(sampling.stop_token_ids):
        check_token_id(token, f"stop_token_ids[{index}]", model.vocab_size)
    if sampling.min_tokens and len(set(sampling.stop_token_ids)) == model.vocab_size:
        raise RequestRefused(
            "stop_token_ids name the whole vocabulary, and min_tokens forbids stop tokens: no token is left",
            param="stop_token_ids",
        )


def check_token_id(token: int, param: str, vocab_size: int) -> None:
    """Raises RequestRefused for a token id outside the vocabulary."""
    if not 0 <= token < vocab_size:
        raise RequestRefused(f"{param} is {token}, outside the vocabulary of {vocab_size}", param=param)


def _check_embeddings(request: GenerationRequest, model: LoadedModel) -> None:
    for extra_id, rows in request.embeddings.items():
        if rows.ndim != 2 or rows.shape[1] != model.hidden_size:  # noqa: PLR2004 - [rows, hidden]
            raise RequestRefused(
                f"embeddings of extra id {extra_id} have shape {list(rows.shape)}; "
                f"[rows, {model.hidden_size}] is needed",
                param="prompt",
            )


def _check_row(request: GenerationRequest, index: int, row: int) -> None:
    extra_id = request.extra_ids[index] if request.extra_ids is not None else 0
    rows = request.embeddings.get(extra_id)
    if rows is None or row >= rows.shape[0]:
        raise RequestRefused(
            f"prompt[{index}] is a fake id for row {row}, which extra id {extra_id} does not have",
            param=f"prompt[{index}]",
        )
