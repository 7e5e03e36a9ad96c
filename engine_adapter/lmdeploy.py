"""LMDeploy's `api_server` as an engine: its adapter, and chats as its template gets them.

It sends no KV events: kvpin learns what it holds from its answers. Routes, fields and metrics are those of
the sources of 0.16 and 0.18.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import msgspec
from typing_extensions import override

from engine_adapter.base import EngineAdapter
from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.hold import Hold
from engine_adapter.http.adapter import ServedModel, read_models, wrong_kind
from engine_adapter.http.answer_fields import read_answer_usage
from engine_adapter.http.control import Samples, read_samples
from engine_adapter.http.openai_answer import hold_openai
from engine_adapter.prompt.template_input import ContentFormat, TemplateInput
from engine_adapter.types import (
    TRANSLATED_ROUTES,
    Capability,
    EngineInfo,
    EngineLoad,
    EngineSpec,
    Finding,
    KvTarget,
)

# --- template input -------------------------------------------------------------------------------------
# Chats as LMDeploy gives them to the model's template: `serve/processors/multimodal.py` and
# `serve/parsers/tool_parser/tool_parser.py` of 0.18.
#
# Messages keep their fields. Every template gets a string, and functions without the tool around them.

# The fields of its model of a function, in their order.
_OF_FUNCTIONS = ("description", "name", "parameters")


def _tools(tools: list[dict[str, Any]]) -> list[Any]:
    """A tool without a function stays one: the server refuses it."""
    functions = [tool.get("function") for tool in tools]
    return [{name: f.get(name) for name in _OF_FUNCTIONS} if isinstance(f, dict) else f for f in functions]


def _message(message: dict[str, Any], _wanted: ContentFormat) -> dict[str, Any]:
    return message if message.get("content") is not None else message | {"content": ""}


LMDEPLOY_INPUT = TemplateInput(_tools, _message, content_format=lambda _: ContentFormat.STRING)


# --- adapter --------------------------------------------------------------------------------------------

# `cache_block_seq_len`, unless its operator chose another: no route tells.
BLOCK_TOKENS = 64
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NO_CACHE = Finding("prefix caching is off: it reuses nothing", "start it with --enable-prefix-caching")
NO_METRICS = Finding(
    "it tells neither its load nor when it was started: kvpin does not see a quick restart",
    "start it without --disable-metrics",
)
_STARTED, _RUNNING = "process_start_time_seconds", "lmdeploy:num_requests_running"
_USAGE, _HITS = "lmdeploy:gpu_cache_usage_perc", "lmdeploy:cached_tokens_total"
_WAITING = ("lmdeploy:num_requests_waiting", "lmdeploy:num_api_requests_waiting")
_NAMES = (_STARTED, _RUNNING, _USAGE, _HITS, *_WAITING)
_ONLY_TEXT = "its /v1/completions takes no token ids: send a text, or a chat"
_NOT_WARMED = "send a chat with max_tokens=1: its completions take no token ids, so that warm is refused"
# A prompt of two blocks or more.
_TRIAL = {"messages": [{"role": "user", "content": "a " * 3 * BLOCK_TOKENS}], "max_tokens": 1}
# Seconds that the trial may take: a busy engine may queue it.
_PATIENCE_S = 5.0


class _Sleeping(msgspec.Struct, frozen=True):
    is_sleeping: bool = False


class LMDeployAdapter(EngineAdapter):
    """`EngineAdapter` of LMDeploy."""

    instead = dict.fromkeys((Capability.EXTRA_IDS, Capability.RESTORE, Capability.PIN), _NOT_WARMED)

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._instance = uuid.uuid4().hex
        self._model: ServedModel | None = None
        self._started: float | None = None
        self._caches: bool | None = None

    @override
    async def connect(self) -> EngineInfo:
        await self._check_awake()
        listed, metrics = await self._control.get("/v1/models"), await self._metrics()
        self._model = model = read_models(listed, self.spec.model)
        started = metrics.sum(_STARTED) if metrics is not None else None
        if started is None or started != self._started:
            self._started, self._caches = started, None
        if self._caches is None:
            has_hits = metrics is not None and bool(metrics.sum(_HITS))
            self._caches = has_hits or await self._try_cache(model.name)
        self.capabilities = frozenset({Capability.CACHED_TOKENS})
        another = wrong_kind(listed, self.spec)
        flaws = (NO_CACHE, self._caches is False), (NO_METRICS, metrics is None)
        found = tuple([finding for finding, is_there in flaws if is_there])
        self._findings = found if another is None else (another,)  # the others name flags that it has not
        return EngineInfo(
            model=model.name,
            instance=self._instance if started is None else f"{started:.6f}",
            names_process=started is not None,
            rendering=f"model {model.name}",
            capabilities=self.capabilities,
            tokens_per_block=BLOCK_TOKENS,
            # Without --model-name, the model's name is its directory or hub id.
            tokenizer=self.spec.tokenizer or (model.name if "/" in model.name else None),
            loras=model.others,  # it names no parents
            template_input=LMDEPLOY_INPUT,
            runs_several=False,  # completions ignore `n`, and streams do not tell their prompts apart
            served_as_chats=TRANSLATED_ROUTES,
            card=model.card,
        )

    @override
    async def load(self) -> EngineLoad:
        """The counts are up to 10 s old: so often it renews them."""
        await self._check_awake()
        metrics, known = await self._metrics(), self._model
        if known is not None and (metrics.sum(_STARTED) if metrics is not None else None) != self._started:
            raise EngineUnavailable("the engine was restarted")
        if metrics is None:
            now = read_models(await self._control.get("/v1/models"), self.spec.model)
            return EngineLoad(0, 0, counted=False, outdated=known is not None and now != known)
        usage = metrics.sum(_USAGE)
        return EngineLoad(
            running=int(metrics.sum(_RUNNING) or 0),
            waiting=int(sum(metrics.sum(name) or 0 for name in _WAITING)),
            gpu_usage=None if usage is None else min(max(usage, 0.0), 1.0),
        )

    @override
    def _hold(self, path: str, body: JsonBody, prompt: KvTarget | None) -> Hold:
        """Raises EngineRejected for token ids. A session id is left out: two requests with one are an error,
        and conversations do not need it."""
        prompt_field = body.get("prompt") if path == COMPLETIONS else None
        if isinstance(prompt_field, list) and not all(isinstance(each, str) for each in prompt_field):
            raise EngineRejected(_ONLY_TEXT, status=400, param="prompt", type="invalid_request_error")
        dropped = ("session_id",) if path in (CHAT, COMPLETIONS) and "session_id" in body else ()
        return hold_openai(path, body, drop=dropped, ask_usage=True)

    async def _check_awake(self) -> None:
        """Raises EngineUnavailable while it sleeps: it has dropped all its KV."""
        await self._control.fetch("GET", "/health")
        told = await self._control.read_optional(_Sleeping, "/is_sleeping")
        if told is not None and told.is_sleeping:
            raise EngineUnavailable("the engine sleeps: POST /wakeup wakes it")

    async def _metrics(self) -> Samples | None:
        """The values that are read here; None if it has no metrics."""
        page = await self._control.fetch_optional("/metrics")
        return None if page is None else read_samples(page, _NAMES)

    async def _try_cache(self, model: str) -> bool | None:
        """True if the second of two equal prompts is reused; None where that may not or cannot be tried."""
        if not self.may_try:
            return None
        try:
            async with asyncio.timeout(_PATIENCE_S):
                chat = msgspec.json.encode({"model": model, **_TRIAL})
                for _ in range(2):
                    cached = read_answer_usage(await self._control.fetch("POST", CHAT, chat)).cached_tokens
                    if cached != 0:  # older versions do not tell
                        return None if cached is None else True
        except (EngineRejected, TimeoutError):
            return None
        return False
