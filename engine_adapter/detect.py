"""What an engine is: its kind, from its routes, without changing anything; and its release, to compare."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec

from engine_adapter.body import UNREADABLE
from engine_adapter.errors import EngineRejected, EngineSpecError
from engine_adapter.http.adapter import KIND_OF_OWNER, owner_of
from engine_adapter.http.control import WANTS_KEY, ControlClient
from engine_adapter.types import EngineSpec

# --- versions of engines, to compare --------------------------------------------------------------------

_NUMBERS = re.compile(r"\d+(\.\d+)*")


def release_of(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with, e.g. (0, 32, 0) of `0.32.0+cpu`; () where there are none."""
    numbers = _NUMBERS.match(version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


# --- finds the kind of an engine from its routes, without changing anything -----------------------------

_MODELS = "/v1/models"
_Answer = dict[str, Any]
_Routes = tuple[tuple[str, str, Callable[[_Answer], bool]], ...]
# Tried first, because the embedded engine also has routes of vLLM, and a NIM those of the engine inside.
_ROUTES: _Routes = (
    ("embedded", "/kv/info", lambda answer: "gpu_blocks" in answer and "instance" in answer),
    ("nim", "/v1/metadata", lambda answer: "modelInfo" in answer or "assetInfo" in answer),
)
# Tried if `owned_by` does not help.
_MORE_ROUTES: _Routes = (
    ("llama_server", "/props", lambda answer: "default_generation_settings" in answer),
    ("vllm", "/kv_event_sources", lambda answer: any("endpoint" in _object(v) for v in answer.values())),
    ("tensorrt_llm", "/server_info", lambda answer: "kv_cache_hash_algo" in answer),
    (
        "sglang",
        "/server_info",
        lambda answer: bool({"radix_eviction_policy", "tokenizer_path"} & answer.keys()),
    ),
    ("sglang", "/get_server_info", lambda answer: "tokenizer_path" in answer),
)


async def detect_kind(spec: EngineSpec) -> str:
    """The kind of the engine at `spec.url`, one of `ENGINE_KINDS`; `spec.kind` is ignored.

    Raises:
        EngineUnavailable: nothing answers there.
        EngineRejected: the server wants another key, or has no OpenAI API.
        EngineSpecError: the address is invalid, or it is a kvpin's.
    """
    refused: EngineRejected | None = None
    models: _Answer = {}
    async with aclosing(ControlClient(spec)) as control:
        try:
            models = await _ask(control, _MODELS)
        except EngineRejected as error:
            refused = error
        kind, owner = await _by_routes(control, _ROUTES), owner_of(models)
        if kind is None and owner == "kvpin":
            raise EngineSpecError(f"{spec.url} is a kvpin: give the address of an engine")
        kind = kind or KIND_OF_OWNER.get(owner) or await _by_routes(control, _MORE_ROUTES)
    if kind is not None:
        return kind
    if models.get("data"):
        return "openai_compatible"
    if refused is not None and refused.status in WANTS_KEY:
        raise EngineRejected(f"{spec.url}: {refused}", status=refused.status)
    raise EngineRejected(f"{spec.url} lists no model at {_MODELS}: kvpin cannot use it", status=404)


async def detect_inside(control: ControlClient) -> str | None:
    """The kind of the engine inside another server, such as a NIM; None if it is hidden. Raises
    EngineRejected if the server wants another key, or has no OpenAI API."""
    owner = owner_of(await _ask(control, _MODELS))
    return KIND_OF_OWNER.get(owner) or await _by_routes(control, _MORE_ROUTES)


async def _by_routes(control: ControlClient, routes: _Routes) -> str | None:
    """The kind of the first route that exists and answers as that kind does."""
    for kind, path, is_it in routes:
        try:
            answer = await _ask(control, path)
        except EngineRejected:
            continue
        if is_it(answer):
            return kind
    return None


async def _ask(control: ControlClient, path: str) -> _Answer:
    """The JSON object at a path, {} for any other answer."""
    content = await control.fetch("GET", path)
    try:
        return _object(msgspec.json.decode(content))
    except UNREADABLE:
        return {}


def _object(value: object) -> _Answer:
    return value if isinstance(value, dict) else {}
