"""Findings about an SGLang server, with the flags that fix them."""

from __future__ import annotations

from collections.abc import Iterator

from engine_adapter.events.options import RANKS, EventSpec
from engine_adapter.events.subscriber import EventEndpoints
from engine_adapter.sglang.server_info import EVENTS_CARRY_LORA, EVENTS_CARRY_SALTS, ServerInfo
from engine_adapter.types import Finding

_EVENTS_FLAG = (
    '--kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:5657"}\''
)

_LEARNED = "kvpin learns what it holds from its answers"


def event_endpoints(info: ServerInfo, spec: EventSpec) -> EventEndpoints | None:
    """The addresses at which this machine reads the server's KV events; None if it cannot follow them."""
    return None if any(_why_not_followed(info, spec)) else _endpoints(info, spec)


def why_events_do_not_fit(info: ServerInfo, spec: EventSpec) -> Finding | None:
    """Why the server's KV events cannot be followed; None where they can."""
    return next(_why_not_followed(info, spec), None) or _why_no_endpoint(info, spec)


def find(
    info: ServerInfo, spec: EventSpec, *, jinja: bool, tokenizes: bool, window: int | None = None
) -> tuple[Finding, ...]:
    """All findings. The server `tokenizes` messages, and renders chats with a Jinja template (`jinja`). Its
    model's sliding windows have `window` tokens; None if they are not followed."""
    found = _findings(info, spec, jinja=jinja, tokenizes=tokenizes)
    return (*found, *_hybrid(info, window))


def _hybrid(info: ServerInfo, window: int | None) -> Iterator[Finding]:
    """Why predictions for a model with several kinds of attention are not exact."""
    if not info.radix_cache or not info.is_hybrid:
        return
    less = "it may reuse less than predicted"
    if info.keeps_states:
        yield Finding(f"no event tells which states of its linear attention or Mamba layers it keeps: {less}")
    elif info.hicache:
        yield Finding(f"no event tells what its sliding windows hold on the host tier: {less}")
    elif not info.follows_windows:
        yield Finding(
            f"its pages are too small to follow its sliding windows: {less}", "start it with --page-size 16"
        )
    elif window is None:
        yield Finding(
            f"no config.json here says how long its sliding windows are: {less}",
            "copy the model's directory here, without the weights, and name it: tokenizer=DIR",
        )
    elif info.drops_windows:
        yield Finding(
            "its sliding windows have less memory than full attention, and no event tells which it drops: "
            f"once {info.window_tokens} tokens of windows were kept, {less}",
            "start it with --swa-full-tokens-ratio 1",
        )


def _findings(info: ServerInfo, spec: EventSpec, *, jinja: bool, tokenizes: bool) -> Iterator[Finding]:
    if info.radix_cache or info.disaggregation != "decode":  # such a half computes no prompts, and keeps none
        yield from _of_events(info, spec)
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


def _of_events(info: ServerInfo, spec: EventSpec) -> Iterator[Finding]:
    """What its KV events lack."""
    no_events, endpoints = why_events_do_not_fit(info, spec), _endpoints(info, spec)
    if no_events is not None:
        yield no_events
    elif endpoints is not None and endpoints.replay is None:
        yield Finding(
            "without a replay socket, kvpin does not know what it held before, and one lost event means "
            "starting over",
            'add "replay_endpoint": "tcp://*:5657" to --kv-events-config',
        )


def _why_not_followed(info: ServerInfo, spec: EventSpec) -> Iterator[Finding]:
    """Why its KV events, wherever they are, do not show what it holds."""
    if not info.radix_cache:
        yield Finding("it reuses no prefixes", "start it without --disable-radix-cache")
    if info.page_size is None:
        yield Finding(f"it does not report its page size, so {_LEARNED}")
    if (ranks := info.dp_ranks) > 1 and spec.options.dp_rank is None:
        yield Finding(
            f"it has {ranks} data-parallel ranks and chooses one itself, so {_LEARNED}",
            f"{RANKS}, or add it {ranks} times, with dp_rank=0 to {ranks - 1}",
        )
    if info.pairs_tokens:
        yield Finding(
            f"with --speculative-algorithm {info.speculative} its events hold pairs of tokens, "
            f"which kvpin cannot follow, so {_LEARNED}",
        )
    for is_wrong, keys, since, instead in (
        (not info.events_carry_salts, "cache salts", EVENTS_CARRY_SALTS, ""),
        (
            info.lora and not info.events_carry_lora,
            "LoRA adapters",
            EVENTS_CARRY_LORA,
            ", or serve without LoRA",
        ),
    ):
        if is_wrong:
            yield Finding(
                f"the KV events of SGLang {info.version} do not carry {keys}, so {_LEARNED}",
                f"use {'.'.join(map(str, since))} or later{instead}",
            )


def _why_no_endpoint(info: ServerInfo, spec: EventSpec) -> Finding | None:
    if _endpoints(info, spec) is not None:
        return None
    if info.publisher is None:
        return Finding(f"it publishes no KV events, so {_LEARNED}", f"start it with {_EVENTS_FLAG}")
    return Finding(
        f"its KV events at tcp://{info.publisher.host}:{info.publisher.port} cannot be reached from "
        f"here, so {_LEARNED}",
        f"start it with {_EVENTS_FLAG}",
    )


def _endpoints(info: ServerInfo, spec: EventSpec) -> EventEndpoints | None:
    publisher = info.publisher
    if publisher is None or not publisher.binds:
        return spec.options.endpoints(spec.url, None, None)
    events, replay = publisher.endpoints(spec.options.dp_rank or 0)
    return spec.options.endpoints(spec.url, events, replay, publisher.topic)
