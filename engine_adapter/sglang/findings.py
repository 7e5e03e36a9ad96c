"""What keeps kvpin from using an SGLang server fully, and the flags that mend it."""

from __future__ import annotations

from collections.abc import Iterator

from engine_adapter.events.sources import reachable_endpoint
from engine_adapter.sglang.options import SglangSpec
from engine_adapter.sglang.server_info import (
    EVENTS_TELL_ADAPTERS,
    EVENTS_TELL_SALTS,
    EventPublisher,
    ServerInfo,
)
from engine_adapter.types import Finding

_EVENTS_FLAG = (
    '--kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:5657"}\''
)

_LEARNED = "what it holds is learned from its answers"


def why_events_do_not_fit(info: ServerInfo, spec: SglangSpec) -> Finding | None:
    """Why the server's KV events cannot be followed; None where they can."""
    if not info.radix_cache:
        return Finding("it reuses no prefixes", "start it without --disable-radix-cache")
    if info.page_size is None:
        return Finding(f"it does not say its page size, so that {_LEARNED}")
    if info.dp_ranks > 1 and spec.options.dp_rank is None:
        ranks = info.dp_ranks
        return Finding(
            f"it has {ranks} data-parallel ranks and chooses among them itself, so that {_LEARNED}",
            f"name it once for each rank, with dp_rank=0 to dp_rank={ranks - 1}",
        )
    if info.pairs_tokens:
        return Finding(
            f"with --speculative-algorithm {info.speculative} its events tell of pairs of tokens, "
            f"which are not followed: {_LEARNED}",
        )
    return _why_events_mislead(info) or _why_no_endpoint(info, spec)


def find(info: ServerInfo, spec: SglangSpec, *, jinja: bool, tokenizes: bool) -> tuple[Finding, ...]:
    """All that stands in the way.

    Args:
        info: what the server said of itself.
        spec: how the operator described it.
        jinja: its chats are written by a Jinja template.
        tokenizes: it tokenises messages.
    """
    return tuple(_findings(info, spec, jinja=jinja, tokenizes=tokenizes))


def _findings(info: ServerInfo, spec: SglangSpec, *, jinja: bool, tokenizes: bool) -> Iterator[Finding]:
    events = why_events_do_not_fit(info, spec)
    if events is not None:
        yield events
    elif _has_no_replay(info, spec):
        yield Finding(
            "without a replay socket, what it held before kvpin came is not known, and a lost event means "
            "starting over",
            'add "replay_endpoint": "tcp://*:5657" to --kv-events-config',
        )
    if info.radix_cache and not info.cache_report:
        yield Finding(
            "its usage does not tell cached tokens: kvpin asks chats and completions for them in another way",
            "start it with --enable-cache-report",
        )
    if info.radix_cache and not info.hicache:
        yield Finding(
            "what its GPU evicts is lost", "start it with --enable-hierarchical-cache to give it a host tier"
        )
    if not tokenizes:
        yield Finding("it does not tokenise chats, so that kvpin cannot check that it does so alike")
    elif not jinja:
        yield Finding("its chats are sent as text: it tokenises again what kvpin has tokenised")
    if info.completion_template:
        yield Finding(
            "text completions are not followed: they are written into a template first",
            "start it without --completion-template",
        )
    if info.lacks_admin_key:
        yield Finding(
            "it cannot be flushed: that needs its --admin-api-key",
            "let that be its --api-key too, and give it to kvpin as api_key",
        )
    if info.disaggregation != "null":
        yield Finding(
            f"it only does the {info.disaggregation} half of each request, which kvpin does not pair",
            "put SGLang's own router between kvpin and the two halves",
        )


def _why_events_mislead(info: ServerInfo) -> Finding | None:
    if not info.tells_salts:
        return Finding(
            f"the KV events of SGLang {info.version} do not tell cache salts, so that {_LEARNED}",
            f"use {_release(EVENTS_TELL_SALTS)} or later",
        )
    if info.lora and not info.tells_adapters:
        return Finding(
            f"the KV events of SGLang {info.version} do not tell LoRA adapters, so that {_LEARNED}",
            f"use {_release(EVENTS_TELL_ADAPTERS)} or later, or serve without LoRA",
        )
    return None


def _why_no_endpoint(info: ServerInfo, spec: SglangSpec) -> Finding | None:
    if spec.options.events is not None:
        return None
    if info.publisher is None:
        return Finding(f"it publishes no KV events, so that {_LEARNED}", f"start it with {_EVENTS_FLAG}")
    if info.publisher.binds and _reachable(info.publisher, spec) is not None:
        return None
    return Finding(
        f"its KV events at tcp://{info.publisher.host}:{info.publisher.port} cannot be subscribed to from "
        f"here, so that {_LEARNED}",
        f"start it with {_EVENTS_FLAG}",
    )


def _reachable(publisher: EventPublisher, spec: SglangSpec) -> str | None:
    return reachable_endpoint(publisher.endpoints(spec.options.dp_rank or 0)[0], spec.url)


def _has_no_replay(info: ServerInfo, spec: SglangSpec) -> bool:
    told = info.publisher is not None and info.publisher.replay_port is not None
    return spec.options.replay is None and not (told and spec.options.events is None)


def _release(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
