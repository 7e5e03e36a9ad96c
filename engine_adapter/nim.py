"""NVIDIA NIM as an engine: it is one of the others inside, and is driven as that.

connect → is it ready, and a NIM → which engine is inside (detect.py) → that engine's adapter, for everything

NIM 2.x passes on the routes of the vLLM or SGLang inside it. NIM 1.x wraps its engine in a server of its own:
what is inside does not show, and it is used as any engine that speaks OpenAI's API.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from engine_adapter.base import EngineAdapter
from engine_adapter.body import JsonBody
from engine_adapter.detect import detect_inside
from engine_adapter.errors import EngineRejected, NotSupported
from engine_adapter.hold import Forecast, Hold, RequestBody
from engine_adapter.http.control import ControlClient
from engine_adapter.http.transport import OutgoingRequest
from engine_adapter.types import (
    BelowGpu,
    Capability,
    EngineInfo,
    EngineLoad,
    EngineSpec,
    Finding,
    KvEvent,
    KvProgress,
    KvTarget,
    KvVerb,
    Pinned,
    PromptTable,
    RenderedPrompt,
    TokenIds,
)

READY, METADATA, VERSION = "/v1/health/ready", "/v1/metadata", "/v1/version"
UNKNOWN = "openai_compatible"
_INSIDE = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}
_REUSE = "NIM_ENABLE_KV_CACHE_REUSE=1"
NOT_A_NIM = Finding(
    f"it is no NIM: it has neither {METADATA} nor {VERSION}", "name its own kind, or leave the kind out"
)
HIDDEN = Finding(
    "which engine is inside does not show, as with NIM 1.x: what it holds is learned from its answers, and "
    "whether it reuses KV at all cannot be told",
    f"use NIM 2.x, or at least start this one with {_REUSE}",
)

MakeAdapter = Callable[[EngineSpec], EngineAdapter]


class NimAdapter:
    """`EngineAdapter` of a NIM."""

    def __init__(self, spec: EngineSpec, make: MakeAdapter) -> None:
        """`make` makes the adapter of any kind. Raises EngineSpecError for an address that is none."""
        self.spec = spec
        self._make = make
        self._control = ControlClient(spec)
        self._inner = make(replace(spec, kind=UNKNOWN))
        self._findings: tuple[Finding, ...] = ()

    async def connect(self) -> EngineInfo:
        """See `EngineAdapter.connect`."""
        await self._check_ready()
        version = await self._version()
        info, finding = await self._connect_inside(await detect_inside(self._control))
        found = (NOT_A_NIM if version is None else None, finding)
        self._findings = tuple(finding for finding in found if finding is not None)
        return replace(info, version=", ".join(filter(None, (f"NIM {version or ''}".strip(), info.version))))

    async def load(self) -> EngineLoad:
        """See `EngineAdapter.load`."""
        await self._check_ready()
        return await self._inner.load()

    def findings(self) -> tuple[Finding, ...]:
        """See `EngineAdapter.findings`."""
        return self._findings + self._inner.findings()

    def forecast(self, prompt: KvTarget) -> Forecast | None:
        """See `EngineAdapter.forecast`."""
        return self._inner.forecast(prompt)

    def hold(
        self, path: str, body: RequestBody, prompt: KvTarget | None
    ) -> AbstractAsyncContextManager[Hold]:
        """See `EngineAdapter.hold`."""
        return self._inner.hold(path, body, prompt)

    def prepare(
        self, method: str, path: str, headers: Mapping[str, str], body: RequestBody
    ) -> OutgoingRequest:
        """See `EngineAdapter.prepare`."""
        return self._inner.prepare(method, path, headers, body)

    def cached_tokens(self, headers: Mapping[str, str]) -> int | None:
        """See `EngineAdapter.cached_tokens`."""
        return self._inner.cached_tokens(headers)

    def not_supported(self, capability: Capability) -> NotSupported:
        """See `EngineAdapter.not_supported`."""
        return self._inner.not_supported(capability)

    async def tokenize(self, path: str, body: JsonBody) -> TokenIds[int]:
        """See `EngineAdapter.tokenize`."""
        return await self._inner.tokenize(path, body)

    async def render(self, path: str, body: JsonBody) -> RenderedPrompt:
        """See `EngineAdapter.render`."""
        return await self._inner.render(path, body)

    def events(self) -> AsyncGenerator[KvEvent, None]:
        """See `EngineAdapter.events`."""
        return self._inner.events()

    async def lookup(self, prompt: KvTarget) -> BelowGpu | None:
        """See `EngineAdapter.lookup`."""
        return await self._inner.lookup(prompt)

    def operate(self, verb: KvVerb, target: KvTarget) -> AsyncGenerator[KvProgress, None]:
        """See `EngineAdapter.operate`."""
        return self._inner.operate(verb, target)

    async def pin(self, target: KvTarget, ttl_s: float) -> Pinned:
        """See `EngineAdapter.pin`."""
        return await self._inner.pin(target, ttl_s)

    async def unpin(self, pin_id: str) -> bool:
        """See `EngineAdapter.unpin`."""
        return await self._inner.unpin(pin_id)

    async def put_prompt_table(self, table: PromptTable) -> None:
        """See `EngineAdapter.put_prompt_table`."""
        await self._inner.put_prompt_table(table)

    async def delete_prompt_table(self, table_id: str) -> None:
        """See `EngineAdapter.delete_prompt_table`."""
        await self._inner.delete_prompt_table(table_id)

    async def stats(self) -> dict[str, Any]:
        """See `EngineAdapter.stats`."""
        return await self._inner.stats()

    async def aclose(self) -> None:
        """See `EngineAdapter.aclose`."""
        await self._inner.aclose()
        await self._control.aclose()

    async def _connect_inside(self, kind: str | None) -> tuple[EngineInfo, Finding | None]:
        """Connects as what was found inside, or as any engine; and why no better."""
        if kind not in _INSIDE:
            return await self._connect_as(UNKNOWN), HIDDEN
        try:
            return await self._connect_as(kind), None
        except EngineRejected as error:
            return await self._connect_as(UNKNOWN), _shut(_INSIDE[kind], error)

    async def _connect_as(self, kind: str) -> EngineInfo:
        """Connects by the adapter of that kind, which is the one that is there if it was before."""
        if self._inner.spec.kind != kind:
            before, self._inner = self._inner, self._make(replace(self.spec, kind=kind))
            await before.aclose()
        return await self._inner.connect()

    async def _check_ready(self) -> None:
        """Raises EngineUnavailable while the model is loaded; what is no NIM has no such route."""
        try:
            await self._control.fetch("GET", READY)
        except EngineRejected as error:
            if error.status != 404:  # noqa: PLR2004 - HTTP
                raise

    async def _version(self) -> str | None:
        """The release, "" where only its metadata is there; None for what is no NIM."""
        for path in (VERSION, METADATA):
            try:
                answer = await self._control.get(path)
            except EngineRejected:
                continue
            release = answer.get("release", answer.get("version")) if isinstance(answer, dict) else None
            return release if isinstance(release, str) else ""
        return None


def _shut(inside: str, error: EngineRejected) -> Finding:
    return Finding(
        f"{inside} is inside, but not all of its own routes are reachable ({error}): what it holds is "
        "learned from its answers",
        f"let the NIM pass on the routes of {inside}",
    )
