"""Findings about an SGLang server, with the flags that fix them."""

from __future__ import annotations

from collections.abc import Iterator

from engine_adapter.events.sources import RANKS, reachable_endpoint
from engine_adapter.sglang.options import SglangSpec
from engine_adapter.sglang.server_info import (
    EVENTS_CARRY_LORA,
    EVENTS_CARRY_SALTS,
    EventPublisher,
    ServerInfo,
)
from engine_adapter.types import Finding

_EVENTS_FLAG = (
    '--kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:5657"}\''
)

_LEARNED = "kvpin learns what it holds from its answers"


def why_events_do_not_fit(info: ServerInfo, spec: SglangSpec) -> Finding | None:
    """Why the server's KV events cannot be followed; None where they can."""
    if not info.radix_cache:
        return Finding("it reuses no prefixes", "start it without --disable-radix-cache")
    if info.page_size is None:
        return Finding(f"it does not report its page size, so {_LEARNED}")
    if info.dp_ranks > 1 and spec.options.dp_rank is None:
        ranks = info.dp_ranks
        return Finding(
            f"it has {ranks} data-parallel ranks and chooses one itself, so {_LEARNED}",
            f"{RANKS}, or add it {ranks} times, with dp_rank=0 to {ranks - 1}",
        )
    if info.pairs_tokens:
        return Finding(
            f"with --speculative-algorithm {info.speculative} its events hold pairs of tokens, "
            f"which kvpin cannot follow, so {_LEARNED}",
        )
    return _why_events_mislead(info) or _why_no_endpoint(info, spec)


def find(info: ServerInfo, spec: SglangSpec, *, jinja: bool, tokenizes: bool) -> tuple[Finding, ...]:
    """All findings.

    Args:
        info: what the server reported.
        spec: how the operator described it.
        jinja: it renders chats with a Jinja template.
        tokenizes: it tokenises messages.
    """
    return tuple(_findings(info, spec, jinja=jinja, tokenizes=tokenizes))


def _findings(info: ServerInfo, spec: SglangSpec, *, jinja: bool, tokenizes: bool) -> Iterator[Finding]:
    events = why_events_do_not_fit(info, spec)
    if events is not None:
        yield events
    elif _has_no_replay(info, spec):
        yield Finding(
            "without a replay socket, kvpin does not know what it held before, and one lost event means "
            "starting over",
            'add "replay_endpoint": "tcp://*:5657" to --kv-events-config',
        )
    if info.radix_cache and not info.cache_report:
        yield Finding(
            "its usage does not report cached tokens: kvpin asks chats and completions in another way",
            "start it with --enable-cache-report",
        )
    if info.radix_cache and not info.hicache:
        yield Finding(
            "what its GPU evicts is lost", "start it with --enable-hierarchical-cache to give it a host tier"
        )
    if not tokenizes:
        yield Finding("it does not tokenise chats for others: kvpin cannot check its own tokens")
    elif not jinja:
        yield Finding("kvpin sends it chats as text, so every prompt is tokenised twice")
    if info.completion_template:
        yield Finding(
            "it renders text completions with a template: kvpin does not follow them",
            "start it without --completion-template",
        )
    if info.lacks_admin_key:
        yield Finding(
            "it cannot be flushed: that needs its --admin-api-key",
            "use the same key as its --api-key, and give it to kvpin as api_key",
        )
    if info.disaggregation != "null":
        yield Finding(
            f"it does only the {info.disaggregation} half of each request; kvpin does not pair the halves",
            "put SGLang's own router between kvpin and the two halves",
        )


def _why_events_mislead(info: ServerInfo) -> Finding | None:
    if not info.events_carry_salts:
        return Finding(
            f"the KV events of SGLang {info.version} do not carry cache salts, so {_LEARNED}",
            f"use {_release(EVENTS_CARRY_SALTS)} or later",
        )
    if info.lora and not info.events_carry_lora:
        return Finding(
            f"the KV events of SGLang {info.version} do not carry LoRA adapters, so {_LEARNED}",
            f"use {_release(EVENTS_CARRY_LORA)} or later, or serve without LoRA",
        )
    return None


def _why_no_endpoint(info: ServerInfo, spec: SglangSpec) -> Finding | None:
    if spec.options.events is not None:
        return None
    if info.publisher is None:
        return Finding(f"it publishes no KV events, so {_LEARNED}", f"start it with {_EVENTS_FLAG}")
    if info.publisher.binds and _reachable(info.publisher, spec) is not None:
        return None
    return Finding(
        f"its KV events at tcp://{info.publisher.host}:{info.publisher.port} cannot be reached from "
        f"here, so {_LEARNED}",
        f"start it with {_EVENTS_FLAG}",
    )


def _reachable(publisher: EventPublisher, spec: SglangSpec) -> str | None:
    return reachable_endpoint(publisher.endpoints(spec.options.dp_rank or 0)[0], spec.url)


def _has_no_replay(info: ServerInfo, spec: SglangSpec) -> bool:
    has_own = info.publisher is not None and info.publisher.replay_port is not None
    return spec.options.replay is None and not (has_own and spec.options.events is None)


def _release(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
