"""`kvpin doctor URL`: the examination of an engine, and its report as text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from engine_adapter import (
    Capability,
    EngineAdapter,
    EngineError,
    EngineInfo,
    EngineLoad,
    EngineRejected,
    EngineSpec,
    EngineSpecError,
    EngineUnavailable,
    Finding,
    ModelState,
    detect_kind,
    make_adapter,
    make_options,
)
from engine_adapter.http.control import WANTS_KEY
from proxy.cli.answer_tables import forms_of
from proxy.cli.engine_probe import ProbedEngine, ProbeResult, View
from proxy.cli.grid import TerminalTable, console
from proxy.observe.logs import configure_logs
from proxy.prompt import Exactness, PromptBuilder, RegisteredTables, verify_exactness
from proxy.settings import LogSettings, SettingsError, UndetectedSettings, parse_engine_flag

# The examination of one engine: what it is, what it can do, and what keeps kvpin from using it fully.
#
# connect → first view of its KV events → with `probe`: two equal requests → tokenisation → findings

CONNECT_S = 30.0
# Engines of every kind may be named so: they are any engine, or have another one inside.
_ANY_KIND = frozenset({"openai_compatible", "nim"})
_TAKES_SLOTS = (
    "--probe empties slots of {url}: a kvpin that uses it loses what they hold. Name its host_cache_dir=DIR, "
    "and kvpin doctor refuses while one does"
)
_REACH_EVENTS = (
    "make its event address reachable from this machine, or name one that is: events=tcp://HOST:PORT"
)


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything an examination found.

    Attributes:
        detected: kvpin detected the kind; the operator did not name it.
        missing: the capabilities it lacks, each with what kvpin does instead.
        view: its cache, as its KV events show it.
        probe: the two requests; None without `probe`.
        unseen: what was not looked at, and why; empty if all was.
    """

    spec: EngineSpec
    detected: bool
    info: EngineInfo
    load: EngineLoad
    missing: dict[str, str]
    tokenisation: Exactness
    view: View
    probe: ProbeResult | None
    findings: tuple[Finding, ...]
    unseen: str = ""

    def as_json(self) -> dict[str, Any]:
        """The examination as JSON, without secrets."""
        info = self.info
        return {
            "url": self.spec.url,
            "kind": self.spec.kind,
            "detected": self.detected,
            "role": info.role or self.spec.role,
            "version": info.version,
            "model": info.model,
            "models": info.models,
            "loras": sorted(info.loras),
            "max_model_len": info.max_model_len,
            "tokens_per_block": info.tokens_per_block,
            "gpu_blocks": info.gpu_blocks,
            "host_blocks": info.host_blocks,
            "running": self.load.running,
            "waiting": self.load.waiting,
            "can": sorted(info.capabilities),
            "cannot": self.missing,
            "tokenisation": msgspec.to_builtins(self.tokenisation),
            "view": asdict(self.view),
            "probe": asdict(self.probe) if self.probe is not None else None,
            "findings": [asdict(finding) for finding in self.findings],
            "unseen": self.unseen or None,
        }


async def examine(
    spec: EngineSpec,
    *,
    probe: bool,
    options: Mapping[str, object] = MappingProxyType({}),
    warn: Callable[[str], None] = lambda _: None,
) -> Examination:
    """Examines the engine at `spec.url`, with two short requests if `probe` is set. An empty `kind` is
    detected, and has these options. `warn` is told of what a probe may cost, before it begins.

    Raises:
        EngineSpecError: the description cannot be used, or the engine seems to be of another kind.
        EngineUnavailable: the engine does not answer.
        EngineRejected: the engine refuses a request that every engine of its kind answers.
    """
    detected = not spec.kind
    if detected:
        kind = await detect_kind(spec)
        spec = replace(spec, kind=kind, options=make_options(kind, options))
    adapter = make_adapter(spec)
    adapter.may_try = probe  # else a slot of a llama-server that a kvpin manages would lose its content
    if probe and adapter.one_owner and not adapter.has_lock:
        warn(_TAKES_SLOTS.format(url=spec.url))
    try:
        info, load = await _connected(adapter, detected=detected)
        if not info.model:
            named = "name one of its models, model=NAME: each is an engine of its own"
            none = Exactness(True, named, "none")
            view, findings = View("none", named), adapter.findings()
            unseen = "the models themselves were not looked at"
            return Examination(spec, detected, info, load, {}, none, view, None, findings, unseen)
        builder = PromptBuilder(info, tables=RegisteredTables(), engines=lambda _: (adapter,))
        source = spec.tokenizer or info.tokenizer
        if source is not None:
            await builder.load(source)
        async with ProbedEngine(adapter, info, builder) as probed_engine:
            view = await probed_engine.first_view(takes_events=probe)
            probed = await probed_engine.probe() if probe else None
        is_there, lacking = await adapter.is_loaded(), sorted(set(Capability) - info.capabilities)
        missing = {capability.value: adapter.not_supported(capability).instead for capability in lacking}
        now = "failed to load" if (state := adapter.model_state) is ModelState.FAILED else f"is {state}"
        unasked = f"not asked: the model {now}, and a question would wake or load it"
        unseen = (
            f"the model {now}: its tokenizer and its process were not looked at; ask again when it is loaded"
        )
        tokenisation = Exactness(False, unasked, "none")
        if is_there:
            tokenisation, unseen = await verify_exactness(builder, adapter), ""
        of_kind = () if detected else await _of_kind(spec)
        findings = (
            *(of_kind or adapter.findings()),  # the flags that these name are of another kind
            *_findings_of(tokenisation if is_there else None, view, probed),
        )
        return Examination(spec, detected, info, load, missing, tokenisation, view, probed, findings, unseen)
    finally:
        await adapter.aclose()


async def _connected(adapter: EngineAdapter, *, detected: bool) -> tuple[EngineInfo, EngineLoad]:
    spec = adapter.spec
    try:
        async with asyncio.timeout(CONNECT_S):
            return await adapter.connect(), await adapter.load()
    except TimeoutError:
        raise EngineUnavailable(f"{spec.url} does not answer within {CONNECT_S:.0f} s") from None
    except EngineError as error:
        if detected or (kind := await _other_kind(spec)) is None:
            raise
        raise EngineSpecError(
            f"{spec.url} is no {spec.kind}: it seems to be of the kind {kind}; name that one, or no kind"
        ) from error


async def _other_kind(spec: EngineSpec) -> str | None:
    """The kind that an engine seems to be of, if an operator named another one."""
    with suppress(EngineError):
        kind = await detect_kind(spec)
        return kind if kind != spec.kind else None
    return None


async def _of_kind(spec: EngineSpec) -> tuple[Finding, ...]:
    if spec.kind in _ANY_KIND or (kind := await _other_kind(spec)) is None or kind in _ANY_KIND:
        return ()
    return (
        Finding(
            f"it seems to be of the kind {kind}, not {spec.kind}: kvpin does not know its cache",
            f"name that kind: {kind}={spec.url}; or name none",
        ),
    )


def _findings_of(tokenisation: Exactness | None, view: View, probe: ProbeResult | None) -> Iterator[Finding]:
    if tokenisation is not None and tokenisation.source == "none":
        yield Finding(tokenisation.detail, "name its model's tokenizer: tokenizer=DIR_OR_HUB_ID")
    if view.state == "unfit":
        told = f"kvpin cannot use its KV events: {view.detail}"
        yield Finding(told, "set its block size to a power of two")
    elif view.state == "late":
        yield Finding(f"its KV events do not arrive: {view.detail}", _REACH_EVENTS)
    if probe is None or probe.reported == probe.predicted != 0:
        return
    second = f"the second of two equal requests of {probe.n_tokens} tokens"
    if probe.error is not None:
        yield Finding(f"it did not serve a prompt of {probe.n_tokens} token ids: {probe.error}")
    elif probe.reported is None:
        yield Finding(f"{second} reported no cached tokens: predictions cannot be checked")
    elif probe.reported == 0:
        yield Finding(f"{second} reused nothing", "turn prefix caching on")
    elif probe.reported > probe.predicted and view.state == "current":
        announced = f"{second} reused {probe.reported} tokens; its KV events announced {probe.predicted}"
        yield Finding(announced, _REACH_EVENTS)
    else:
        yield Finding(f"{second} reused {probe.reported} tokens; kvpin predicted {probe.predicted}")


# --- examines engines for `kvpin doctor` and `kvpin init`, and shows what was found ---------------------

# Nobody knows the key that kvpin gives an engine which it starts.
_STARTED = "; if kvpin started it, `kvpin stats` tells of it, or name its api_key in its [[managed]] table"
# Stands for the kind until it is detected.
_UNKNOWN = "engine"


class UnusableEngine(Exception):
    """An engine cannot be examined: why, in one sentence that names it."""


def show_examination(found: dict[str, Any]) -> None:
    """An examined engine, and what keeps kvpin from using it fully."""
    out = console()
    table = TerminalTable(("name", "text"), text="text")
    for name, text in _of_engine(found):
        if text:
            table.add(Text(name, "bold"), text)
    table.print(out, header=False)
    for number, finding in enumerate(found["findings"], 1):
        out.print(f"\n{number}. {finding['problem']}", markup=False)
        if finding["remedy"]:
            out.print(f"   → {finding['remedy']}", markup=False)
    if told := "; but ".join(filter(None, ("" if found["findings"] else "no findings", found["unseen"]))):
        out.print(f"\n{told}", markup=False)


def _of_engine(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and texts; empty where nothing is known."""
    yield "engine", f"{found['kind']} {found['version']}".rstrip() + ", detected" * found["detected"]
    if found["role"] != "both":
        yield "role", found["role"]
    if found["model"]:
        yield "model", found["model"] + "".join(f", LoRA {name}" for name in found["loras"])
    for at, (name, state) in enumerate(found["models"].items()):
        yield "" if at else "router", f"{name}: {state}"
    if not found["model"]:
        yield "", "each is an engine of its own: name one to examine it, as kind=URL,model=NAME"
        return
    yield "context", f"{found['max_model_len']} tokens" if found["max_model_len"] else ""
    yield "blocks", _blocks(found)
    yield "load", f"{found['running']} running, {found['waiting']} waiting"
    yield "can", ", ".join(found["can"])
    for at, (name, instead) in enumerate(found["cannot"].items()):
        yield "" if at else "cannot", f"{name}: {instead}"
    yield "tokens", found["tokenisation"]["detail"]
    yield "forms", forms_of(found["tokenisation"])
    yield "events", found["view"]["detail"]
    probe = found["probe"]
    if probe is not None and probe["error"] is None:
        reported = f"the engine reports {probe['reported']} of {probe['n_tokens']} tokens reused"
        yield "probe", f"sent twice: {reported}, kvpin predicted {probe['predicted']}"


def _blocks(found: dict[str, Any]) -> str:
    size = [f"{found['tokens_per_block']} tokens each"] if found["tokens_per_block"] else []
    counts = {tier: found[f"{tier}_blocks"] for tier in ("gpu", "host")}
    return ", ".join([*size, *(f"{count} on {tier}" for tier, count in counts.items() if count is not None)])


def examined(
    engines: Sequence[str], options: Mapping[str, str] = MappingProxyType({}), *, probe: bool = False
) -> list[Examination]:
    """Examines engines at the same time, each given as URL or KIND=URL[,name=value…]. A terminal shows that
    it waits for them.

    `options`: further ones of each, `kind` among them. `probe`: send two short requests to each. Raises
    UnusableEngine, with a line for each, if some cannot be examined.
    """

    async def all_of_them() -> list[Examination | UnusableEngine]:
        return await asyncio.gather(*(_examine(text, dict(options), probe=probe) for text in engines))

    configure_logs(LogSettings(level="error"))
    addresses = ", ".join(each.partition(",")[0] for each in engines)
    with Console(stderr=True).status(f"asking {addresses} …"):
        found = asyncio.run(all_of_them())
    if failed := [str(each) for each in found if isinstance(each, UnusableEngine)]:
        raise UnusableEngine("\n".join(failed))
    return [each for each in found if isinstance(each, Examination)]


async def _examine(text: str, options: dict[str, str], *, probe: bool) -> Examination | UnusableEngine:
    address = ""
    try:
        spec, more = _engine_of(text, options)
        address = spec.url
        return await examine(spec, options=more, probe=probe, warn=_warn)
    except (SettingsError, EngineError) as error:
        message = str(error)
        if isinstance(error, EngineRejected) and error.status in WANTS_KEY and not spec.api_key:
            message += _STARTED
        return UnusableEngine(message if address in message else f"{address}: {message}")


def _warn(text: str) -> None:
    Console(stderr=True).print(f"kvpin: {text}", markup=False, highlight=False, soft_wrap=True)


def _engine_of(text: str, options: dict[str, str]) -> tuple[EngineSpec, dict[str, str]]:
    """The description of an engine given as URL or KIND=URL[,name=value…], and the options of its kind. The
    kind is empty where kvpin detects it. Raises SettingsError."""
    if "://" not in text:
        raise SettingsError(f"{text!r} is not an address: it needs http:// or https://")
    kind = options.pop("kind", None)
    named = "://" not in text.partition("=")[0]
    if named and kind is not None:
        raise SettingsError(f"leave out --kind: {text!r} names the kind")
    settings = (
        parse_engine_flag(text if named else f"{kind}={text}", flag="", more=options)
        if named or kind is not None
        else parse_engine_flag(f"{_UNKNOWN}={text}", flag="", reads_as=UndetectedSettings, more=options)
    )
    spec = settings.spec()
    spec = replace(spec, id=spec.id or "engine", kind=spec.kind if named else kind or "")
    return spec, dict(settings.model_extra or {})
