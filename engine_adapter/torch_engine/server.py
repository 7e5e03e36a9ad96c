"""The engine's ASGI app: its routes, and their errors."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from engine_adapter.errors import EngineError
from engine_adapter.http.headers import Headers as RawHeaders
from engine_adapter.http.web_pages import page_asking
from engine_adapter.torch_engine.completions import CompletionRoute
from engine_adapter.torch_engine.embeddings import EmbeddingRoute
from engine_adapter.torch_engine.kv_routes import body_of, kv_routes, kv_stats, service_of
from engine_adapter.torch_engine.metrics import EngineMetrics
from engine_adapter.torch_engine.options import DEFAULT_MAX_BODY_BYTES
from engine_adapter.torch_engine.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    parse,
    parse_tokenize,
)
from engine_adapter.torch_engine.scheduler import check_token_id
from engine_adapter.torch_engine.service import EngineService
from engine_adapter.torch_engine.web import ApiError, as_api_error, error_response, json_response


class EngineHost:
    """Holds the service as soon as it is loaded."""

    def __init__(self, service: EngineService | None = None) -> None:
        self.service = service

    def ready(self) -> EngineService:
        """The service; raises ApiError (503) while it loads and after its engine has ended."""
        if self.service is None:
            raise ApiError("the model is loading", status=503, code="loading")
        if not self.service.engine.alive:
            raise ApiError("the engine is not running", status=503, code="engine_unavailable")
        return self.service


def create_app(
    host: EngineHost, *, max_body_bytes: int = DEFAULT_MAX_BODY_BYTES, key: str | None = None
) -> Starlette:
    """The app around `host`. Its service may be set later. Bodies beyond `max_body_bytes` are a 413. `key`:
    what requests must give; without it, only web pages are refused."""
    app = Starlette(
        middleware=[Middleware(Guard, key=key)],
        routes=[
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            Route("/v1/chat/completions", CompletionRoute(ChatRequest), methods=["POST"]),
            Route("/v1/completions", CompletionRoute(CompletionRequest), methods=["POST"]),
            Route("/v1/embeddings", EmbeddingRoute(), methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            *kv_routes(),
        ],
        exception_handlers={
            HTTPException: _http_error,
            ClientDisconnect: _nobody_to_answer,
            Exception: _fault,
            ApiError: _answer_error,
            EngineError: _answer_error,
        },
    )
    app.state.host = host
    app.state.metrics = EngineMetrics()
    app.state.max_body_bytes = max_body_bytes
    return app


async def health(request: Request) -> Response:
    """200 while the engine serves."""
    service_of(request)
    return json_response({"status": "ok"})


async def metrics(request: Request) -> Response:
    """Prometheus text; without cache statistics after the engine has ended."""
    shown: EngineMetrics = request.app.state.metrics
    service: EngineService | None = request.app.state.host.service
    if service is None:
        raise ApiError("the model is loading", status=503, code="loading")
    stats: Mapping[str, Any] = await kv_stats(service) if service.engine.alive else {}
    return PlainTextResponse(
        shown.render(service.engine.counters, stats), media_type="text/plain; version=0.0.4"
    )


async def models(request: Request) -> Response:
    """A list of the one served model."""
    return json_response({"object": "list", "data": [_model_card(service_of(request))]})


async def model(request: Request) -> Response:
    """One model by name."""
    service = service_of(request)
    service.check_model(request.path_params["model"])
    return json_response(_model_card(service))


async def tokenize(request: Request) -> Response:
    """The tokens of a chat or a prompt, exactly as the engine would run them."""
    service = service_of(request)
    prompt = await service.prompt(parse_tokenize(await body_of(request)))
    extra_ids = prompt.extra_ids
    return json_response(
        {
            "count": len(prompt.token_ids),
            "max_model_len": service.engine.max_model_len,
            "tokens": prompt.token_ids.tolist(),
            "extra_ids": None if extra_ids is None else extra_ids.tolist(),
        }
    )


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    service = service_of(request)
    asked = parse(await body_of(request), DetokenizeRequest)
    limit = service.model.vocab_size
    for index, token in enumerate(asked.tokens):
        check_token_id(token, f"tokens[{index}]", limit)
    return json_response({"prompt": service.tokenizer.decode(asked.tokens)})


def _model_card(service: EngineService) -> dict[str, Any]:
    return {
        "id": service.model.name,
        "object": "model",
        "created": service.created,
        "owned_by": "kvpin",
        "max_model_len": service.engine.max_model_len,
    }


async def _answer_error(_request: Request, error: Exception) -> Response:
    known = as_api_error(error)
    if known is None:
        raise error
    return error_response(known)


async def _http_error(request: Request, error: Exception) -> Response:
    """The router's own errors: 404 and 405."""
    if not isinstance(error, HTTPException):
        raise error
    path = request.url.path
    message = (
        f"{request.method} {path} is not served here" if error.status_code in (404, 405) else error.detail
    )
    answer = error_response(ApiError(message, status=error.status_code))
    answer.headers.update(error.headers or {})
    return answer


async def _nobody_to_answer(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # never sent: the client is gone


async def _fault(_request: Request, _error: Exception) -> Response:
    return error_response(
        ApiError("internal error; the engine's log has the details", status=500, code="internal_error")
    )


_OPEN = "/health"


class Guard:
    """Answers a refused request by itself, and passes all others on. `/health` needs no key."""

    def __init__(self, app: ASGIApp, key: str | None = None) -> None:
        """`key`: what requests must give as `Authorization: Bearer <key>`; None for no key."""
        self._app = app
        self._digest = None if key is None else _digest(f"Bearer {key}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else error_response(refusal))(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if self._digest is not None:
            given = Headers(scope=scope).get("authorization", "")
            if scope["path"] == _OPEN or hmac.compare_digest(self._digest, _digest(given.encode("latin-1"))):
                return None
            return ApiError(
                "the engine needs its key: Authorization: Bearer <key>", status=401, code="invalid_api_key"
            )
        page = page_asking(RawHeaders(scope["headers"]), lambda: scope["scheme"], lambda: scope["server"])
        if page is None:
            return None
        return ApiError(f"the engine answers no web page ({page})", status=403, code="forbidden")


def _digest(text: bytes) -> bytes:
    """Of equal length for all texts: the time of a comparison tells nothing of the key."""
    return hashlib.sha256(text).digest()
