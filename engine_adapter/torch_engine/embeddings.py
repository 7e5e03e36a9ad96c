"""Serves `/v1/embeddings`: of each text the last hidden state after its last token, normalised.

A text runs in the engine's steps like any other prompt: it waits its turn, takes blocks of the KV cache and
shares them. The one token that the engine generates after it is dropped.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.types import Receive, Scope, Send

from engine_adapter.off_loop import off_loop
from engine_adapter.torch_engine.completions import while_client_stays
from engine_adapter.torch_engine.generation import Generation
from engine_adapter.torch_engine.protocol import EmbeddingRequest, inputs_of, parse, salt_of
from engine_adapter.torch_engine.requests import GenerationRequest, SamplingParams, Token
from engine_adapter.torch_engine.scheduler import check_token_id
from engine_adapter.torch_engine.service import EngineService
from engine_adapter.torch_engine.web import ApiError, json_response, read_body
from engine_adapter.types import TokenIds

MAX_TOKENS = 300_000
"""Most tokens of all texts of a request; as at OpenAI."""
AT_ONCE = 64
"""Texts of a request that the engine gets at a time, so that other requests have their turn between them."""
# Numbers that are written as JSON in about 1 ms.
_NUMBERS_PER_MS = 8192


class EmbeddingRoute:
    """The ASGI app of the route."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. When the client leaves, its texts are computed no further."""
        state = scope["app"].state
        service: EngineService = state.host.ready()
        request = parse(await read_body(scope, receive, state.max_body_bytes), EmbeddingRequest)
        service.check_model(request.model)
        hidden_size = service.model.hidden_size
        if request.dimensions not in (None, hidden_size):
            raise ApiError(
                f"dimensions is {request.dimensions}; embeddings of this model have {hidden_size}",
                param="dimensions",
            )
        requests = await _requests(service, request)

        async def answer() -> None:
            vectors: list[bytes] = []
            for first in range(0, len(requests), AT_ONCE):
                vectors += await _vectors(service, requests[first : first + AT_ONCE])
            tokens = sum(len(each.token_ids) for each in requests)
            ms = len(vectors) * hidden_size / _NUMBERS_PER_MS
            response = await off_loop(lambda: json_response(_body(service, request, vectors, tokens)), ms=ms)
            await response(scope, receive, send)

        await while_client_stays(receive, answer())


async def _requests(service: EngineService, request: EmbeddingRequest) -> list[GenerationRequest]:
    """A request to the engine for each text, in their order; raises ApiError and RequestRefused."""
    inputs = inputs_of(request)
    salt = salt_of(request.cache_salt)
    for name, each in inputs.items():
        if isinstance(each, str):
            service.check_chars(len(each), name)
    special = True if request.add_special_tokens is None else request.add_special_tokens
    size = sum(map(len, inputs.values()))
    prompts = await service.tokenizer.off_loop(size, lambda: _tokens(service, inputs, special=special))
    total = sum(map(len, prompts))
    if total > MAX_TOKENS:
        raise ApiError(f"input has {total} tokens; at most {MAX_TOKENS} are taken", param="input")
    request_id = secrets.token_hex(12)
    return [
        GenerationRequest(
            f"{request_id}-{index}",
            prompt,
            SamplingParams(temperature=0.0, max_tokens=1),
            cache_salt=salt,
            priority=request.priority or 0,
            wants_hidden=True,
        )
        for index, prompt in enumerate(prompts)
    ]


def _tokens(
    service: EngineService, inputs: Mapping[str, str | TokenIds[int]], *, special: bool
) -> list[TokenIds[int]]:
    """The token ids of each text, checked."""
    prompts = []
    for name, each in inputs.items():
        if isinstance(each, str):
            token_ids = service.tokenizer.encode(each, add_special_tokens=special)
            if not token_ids:
                raise ApiError(f"{name} has no tokens", param=name)
        else:
            token_ids = each
            for index, token in enumerate(each):
                check_token_id(token, f"{name}[{index}]", service.model.vocab_size)
        service.check_fits(len(token_ids), name)
        prompts.append(token_ids)
    return prompts


async def _vectors(service: EngineService, requests: list[GenerationRequest]) -> list[bytes]:
    """The hidden state of each request; raises RequestFailed, RequestRefused and EngineUnavailable."""
    found: dict[int, bytes] = {}
    async with Generation(service.engine, requests) as generation:
        while len(found) < len(requests):
            for index, outputs in (await generation.outputs()).items():
                for output in outputs:
                    if isinstance(output, Token) and output.hidden is not None:
                        found[index] = output.hidden
    return [found[index] for index in range(len(requests))]


def _body(
    service: EngineService, request: EmbeddingRequest, vectors: list[bytes], tokens: int
) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": index, "embedding": _shown(vector, request.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": service.model.name, "usage": usage}


def _shown(vector: bytes, encoding_format: str | None) -> str | list[float]:
    """The normalised vector as numbers, or as OpenAI's base64: of little-endian float32."""
    values = np.frombuffer(vector, dtype=np.float32)
    length = np.linalg.norm(values)
    normal: NDArray[np.float32] = (values / length if length else values).astype("<f4")
    if encoding_format == "base64":
        return base64.b64encode(normal.tobytes()).decode()
    numbers: list[float] = normal.tolist()
    return numbers
