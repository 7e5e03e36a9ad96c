"""Findings about a vLLM server, with the flags that fix them."""

from __future__ import annotations

from collections.abc import Iterator

from engine_adapter.events.options import RANKS
from engine_adapter.release import release_of
from engine_adapter.types import Finding
from engine_adapter.vllm.discovery import VllmFacts, event_endpoints, is_several
from engine_adapter.vllm.kv_transfer import findings_of_transfer
from engine_adapter.vllm.options import VllmSpec

_FLAG = (
    """start it with --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","""
    """"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}'"""
)
_NO_EVENTS = Finding("it sends no KV events: kvpin learns what it holds from its answers", _FLAG)
_NO_SOURCES = Finding(
    "it does not say where its KV events are: kvpin learns what it holds from its answers",
    f"{_FLAG} and name both addresses: events=tcp://HOST:5557,replay=tcp://HOST:5657",
)
_NO_REPLAY = Finding(
    "missed events cannot be replayed: kvpin does not know what it held before kvpin connected, or while "
    "events were lost",
    'give --kv-events-config a "replay_endpoint" that this machine reaches',
)
_SILENT = Finding(
    "its replay socket does not answer: kvpin does not know what it held before kvpin connected",
    'let kvpin\'s machine reach the "replay_endpoint" of --kv-events-config, or name it: replay=tcp://HOST:PORT',
)
_LMCACHE = Finding(
    "it uses an LMCache that kvpin does not know: its hits are not predicted, and LMCache mixes up the KV of "
    "LoRA adapters and of prompt embeddings",
    "name its server: lmcache=http://HOST:PORT",
)
_UNNAMED_CHUNKS = Finding(
    "it offloads several blocks together and does not say which: what comes back from there is not predicted",
    'add "self_describing_kv_events":true to the "kv_connector_extra_config" of its --kv-transfer-config',
)

_OLDEST = (0, 24)


def findings_of(facts: VllmFacts, spec: VllmSpec, *, replay_is_silent: bool = False) -> tuple[Finding, ...]:
    """All findings, the most important first. `replay_is_silent`: the replay socket did not answer."""
    if facts.wrong_kind is not None:
        return (facts.wrong_kind,)  # the others name flags that it has not
    found = [*_cache_findings(facts), *_event_findings(facts, spec)]
    if facts.metrics.lmcache and spec.options.lmcache is None:
        found.insert(0, _LMCACHE)
    if facts.blocks_per_chunk > 1 and facts.kv_transfer and not facts.kv_transfer.describes_chunks:
        found.append(_UNNAMED_CHUNKS)
    if replay_is_silent:
        found.append(_SILENT)
    return (*found, *_route_findings(facts, spec), *findings_of_transfer(spec, facts.kv_transfer))


def _cache_findings(facts: VllmFacts) -> Iterator[Finding]:
    if facts.metrics.caching is False:
        yield Finding(
            "prefix caching is off: it reuses nothing", "start it without --no-enable-prefix-caching"
        )
    if facts.metrics.block_size is None:
        yield Finding(
            "/metrics does not report its block size: kvpin cannot follow its cache",
            "start it without --disable-log-stats",
        )


def _event_findings(facts: VllmFacts, spec: VllmSpec) -> tuple[Finding, ...]:
    if not facts.metrics.tells_blocks:
        return ()  # _cache_findings says why
    ranks, source = facts.metrics.ranks, facts.source
    if is_several(facts, spec):
        return (
            Finding(
                f"it has {len(ranks)} data-parallel ranks, each with its own cache, and chooses one itself",
                f"{RANKS}, or add it {len(ranks)} times, with dp_rank={ranks[0]} to {ranks[-1]}",
            ),
        )
    endpoints = event_endpoints(facts, spec)
    if endpoints is not None:
        return () if endpoints.replay is not None else (_NO_REPLAY,)
    if source is not None and source.publishes:
        return (
            Finding(
                f"its events at {source.endpoint} cannot be reached from here",
                'give --kv-events-config an "endpoint" such as tcp://*:5557, or name the address that '
                "reaches it: events=tcp://HOST:PORT",
            ),
        )
    return (_NO_EVENTS,) if facts.names_sources else (_NO_SOURCES,)


def _route_findings(facts: VllmFacts, spec: VllmSpec) -> Iterator[Finding]:
    if facts.trials.reports_cached is False:
        yield Finding(
            "its answers do not report reused tokens: predictions cannot be checked",
            "start it with --enable-prompt-tokens-details",
        )
    if facts.trials.takes_salt is False:
        yield Finding("it ignores cache salts on some routes", "upgrade vLLM")
    if not facts.renders:
        yield Finding(
            "kvpin cannot follow chats with images, and serves /v1/responses as chats",
            "start it with --enable-scale-out",
        )
    if not facts.resets:
        yield Finding("its cache cannot be flushed", "start it with VLLM_SERVER_DEV_MODE=1")
    if spec.api_key:
        yield Finding(
            "its --api-key protects only /v1: whoever reaches its port can tokenise, read metrics and, in "
            "dev mode, reset the cache",
            "let only kvpin reach that port",
        )
    if (release := release_of(facts.version)) and release < _OLDEST:
        yield Finding(f"kvpin is not tested with vLLM {facts.version}", "upgrade it to 0.24 or later")
