"""What keeps a vLLM server from being used fully, and the flag that mends it."""

from __future__ import annotations

from collections.abc import Iterator

from engine_adapter.types import Finding
from engine_adapter.vllm.discovery import Facts, event_endpoints, is_several
from engine_adapter.vllm.options import VllmSpec

_FLAG = (
    """start it with --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","""
    """"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}'"""
)
_NO_EVENTS = Finding("it sends no KV events: what it holds is learned from its answers", _FLAG)
_NO_SOURCES = Finding(
    "it does not tell where its KV events are: what it holds is learned from its answers",
    f"{_FLAG} and name both addresses: events=tcp://HOST:5557,replay=tcp://HOST:5657",
)
_NO_REPLAY = Finding(
    "events that were missed cannot be asked for again: what it held before kvpin came, or while events "
    "were lost, is not known",
    'give --kv-events-config a "replay_endpoint" that this machine reaches',
)
_SILENT = Finding(
    "nothing answers where missed events are asked for: what it held before kvpin came is not known",
    'let kvpin\'s machine reach the "replay_endpoint" of --kv-events-config, or name it: replay=tcp://HOST:PORT',
)
_LMCACHE = Finding(
    "it runs over an LMCache that kvpin was not told of: its hits are not predicted, and the KV of one LoRA "
    "adapter, or of one prompt embedding, is taken for that of another",
    "name its server: lmcache=http://HOST:PORT",
)

_OLDEST = (0, 24)


def findings_of(facts: Facts, spec: VllmSpec, *, replay_is_silent: bool = False) -> tuple[Finding, ...]:
    """All that was found, what matters most first. `replay_is_silent`: it was asked, and did not answer."""
    found = [*_cache_findings(facts), *_event_findings(facts, spec)]
    if facts.metrics.lmcache and spec.options.lmcache is None:
        found.insert(0, _LMCACHE)
    if replay_is_silent:
        found.append(_SILENT)
    return (*found, *_route_findings(facts, spec))


def _cache_findings(facts: Facts) -> Iterator[Finding]:
    if facts.metrics.caching is False:
        yield Finding(
            "prefix caching is off: it reuses nothing", "start it without --no-enable-prefix-caching"
        )
    if facts.metrics.block_size is None:
        yield Finding(
            "/metrics does not tell its block size, so that its cache is not followed",
            "start it without --disable-log-stats",
        )


def _event_findings(facts: Facts, spec: VllmSpec) -> tuple[Finding, ...]:
    if not facts.metrics.tells_blocks:
        return ()  # the cache's own findings say why
    ranks, source = facts.metrics.ranks, facts.source
    if is_several(facts, spec):
        return (
            Finding(
                f"it has {len(ranks)} data-parallel ranks, each with a cache of its own",
                f"add it {len(ranks)} times, once for each rank, with dp_rank={ranks[0]} to {ranks[-1]}",
            ),
        )
    endpoints = event_endpoints(facts, spec)
    if endpoints is not None:
        return () if endpoints.replay is not None else (_NO_REPLAY,)
    if source is not None and source.publishes:
        return (
            Finding(
                f"its events at {source.endpoint} can be had on its own machine alone",
                'give --kv-events-config an "endpoint" such as tcp://*:5557, or name the address that '
                "reaches it: events=tcp://HOST:PORT",
            ),
        )
    return (_NO_EVENTS,) if facts.names_sources else (_NO_SOURCES,)


def _route_findings(facts: Facts, spec: VllmSpec) -> Iterator[Finding]:
    if facts.trials.reports_cached is False:
        yield Finding(
            "its answers do not tell how many tokens were reused: predictions cannot be checked",
            "start it with --enable-prompt-tokens-details",
        )
    if facts.trials.takes_salt is False:
        yield Finding("it does not keep the KV of salts apart on every route", "upgrade vLLM")
    if not facts.renders:
        yield Finding(
            "prompts of /v1/responses and of chats with images are not followed",
            "start it with --enable-scale-out",
        )
    if not facts.resets:
        yield Finding("its cache cannot be flushed", "start it with VLLM_SERVER_DEV_MODE=1")
    if spec.api_key:
        yield Finding(
            "its --api-key guards /v1 alone: whoever reaches its port can tokenise, read its metrics and, in "
            "dev mode, reset its cache",
            "let nobody but kvpin reach that port",
        )
    if (version := _release(facts.version)) and version < _OLDEST:
        yield Finding(f"kvpin was never tried on vLLM {facts.version}", "upgrade it to 0.24 or later")


def _release(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()
