"""NVIDIA NIM as an engine: it runs one of the other engines and is driven as that one.

connect → is it a NIM, and ready → which engine is inside (detect.py) → that engine's adapter, for everything

NIM 2.x passes on the routes of the vLLM or SGLang inside it. NIM 1.x hides its engine behind a server of its
own, so kvpin uses it as any engine that speaks OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine_adapter.base import EngineAdapter
from engine_adapter.detect import detect_inside
from engine_adapter.errors import EngineRejected
from engine_adapter.http.adapter import HealthRoute
from engine_adapter.http.control import ControlClient
from engine_adapter.types import EngineInfo, EngineLoad, EngineSpec, Finding
from engine_adapter.vllm.options import VllmOptions

READY, METADATA, VERSION = "/v1/health/ready", "/v1/metadata", "/v1/version"
UNKNOWN = "openai_compatible"
_INSIDE = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}
_REUSE = "NIM_ENABLE_KV_CACHE_REUSE=1"
NOT_A_NIM = Finding(
    f"it is not a NIM: it has neither {METADATA} nor {VERSION}", "name its own kind, or leave the kind out"
)
HIDDEN = Finding(
    "it hides which engine is inside, as NIM 1.x does: kvpin learns what it holds from its answers, and "
    "cannot tell whether it reuses KV at all",
    f"use NIM 2.x, or at least start this one with {_REUSE}",
)

AsKind = Callable[[EngineSpec[Any], str], EngineAdapter]
"""Makes the adapter of another kind for the same server."""


class NimOptions(VllmOptions, frozen=True):
    """Options of `nim` engines: those of the engine inside. Options which that engine lacks are ignored."""


class NimAdapter:
    """The parts that a NIM adds to the engine inside: its readiness, its release, and what hides the engine.

    Everything else is the inner adapter's."""

    def __init__(self, spec: EngineSpec[Any], as_kind: AsKind) -> None:
        self.spec = spec
        self._as_kind = as_kind
        self._control = ControlClient(spec)
        self._health = HealthRoute(self._control, READY)  # a server without it is not a NIM
        self._inner = as_kind(spec, UNKNOWN)
        self._findings: tuple[Finding, ...] = ()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the inner adapter has there
        return getattr(self._inner, name)

    async def connect(self) -> EngineInfo:
        """Connects as the engine inside, once the NIM is ready."""
        self._health = HealthRoute(self._control, READY)
        await self._health.check()
        version = await self._version()
        info, finding = await self._connect_inside(await detect_inside(self._control))
        found = (NOT_A_NIM if version is None else None, finding)
        self._findings = tuple(filter(None, found))
        return replace(info, version=", ".join(filter(None, (f"NIM {version or ''}".strip(), info.version))))

    async def load(self) -> EngineLoad:
        """The load of the engine inside; also the health check."""
        await self._health.check()
        return await self._inner.load()

    def findings(self) -> tuple[Finding, ...]:
        """The findings about the NIM, and those about the engine inside."""
        return self._findings + self._inner.findings()

    async def aclose(self) -> None:
        """Closes connections."""
        await self._inner.aclose()
        await self._control.aclose()

    async def _connect_inside(self, kind: str | None) -> tuple[EngineInfo, Finding | None]:
        """Connects as the engine inside, or as any engine with the finding that says why."""
        if kind not in _INSIDE:
            return await self._connect_as(UNKNOWN), HIDDEN
        try:
            return await self._connect_as(kind), None
        except EngineRejected as error:
            inside = _INSIDE[kind]
            finding = Finding(
                f"{inside} is inside, but not all of its own routes are reachable ({error}): kvpin learns "
                "what it holds from its answers",
                f"let the NIM pass on the routes of {inside}",
            )
            return await self._connect_as(UNKNOWN), finding

    async def _connect_as(self, kind: str) -> EngineInfo:
        """Connects by the adapter of that kind; a new one only where the kind has changed."""
        if self._inner.spec.kind != kind:
            before, self._inner = self._inner, self._as_kind(self.spec, kind)
            await before.aclose()
        return await self._inner.connect()

    async def _version(self) -> str | None:
        """Its release, "" where it has only metadata, None where it is not a NIM."""
        for path in (VERSION, METADATA):
            try:
                answer = await self._control.get(path)
            except EngineRejected:
                continue
            release = answer.get("release", answer.get("version")) if isinstance(answer, dict) else None
            return release if isinstance(release, str) else ""
        return None
