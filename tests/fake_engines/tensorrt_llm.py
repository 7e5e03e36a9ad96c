"""A trtllm-serve without a model: routes, events and refusals of 1.2 to 1.4, and pushed events as in 1.3.

It follows the source and the documents; no real server was available. Its cache offloads evicted blocks to
host memory while there is room, and restores them when a prompt needs them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.fake_engines.answers import Work, answer
from tests.fake_engines.cache import (
    CachePrompt,
    Namespace,
    PageCache,
    RunningPrompt,
    StoredRun,
    _Page,
    signed,
)
from tests.fake_engines.core import EngineCore, Running, output_token, running
from tests.fake_engines.publisher import Publisher
from tests.fake_engines.text import chat_tokens, encode, words

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_COMMON = """
model max_tokens n temperature top_p top_k seed stop stream stream_options user ignore_eos min_tokens echo
logprobs best_of frequency_penalty presence_penalty logit_bias response_format add_special_tokens lora_request
truncate_prompt_tokens disaggregated_params priority conversation_params
"""
_OF_CHATS = """
messages prompt_token_ids cache_salt max_completion_tokens tools tool_choice top_logprobs reasoning_effort
documents add_generation_prompt chat_template chat_template_kwargs mm_processor_kwargs
"""
FIELDS = {
    CHAT: frozenset((_COMMON + _OF_CHATS).split()),
    COMPLETIONS: frozenset(_COMMON.split()) | {"prompt", "suffix", "prompt_ignore_length"},
}
"""The fields that each route takes; others are refused."""
PARAMS = (
    *("request_type", "first_gen_tokens", "ctx_request_id", "encoded_opaque_state", "draft_tokens"),
    *("disagg_request_id", "ctx_dp_rank", "ctx_info_endpoint", "schedule_style", "ctx_usage"),
)
"""The fields of `disaggregated_params`; older versions lack some."""


@dataclass(frozen=True, slots=True)
class TrtllmOptions:
    """How a server is started, and what its version has.

    Attributes:
        host_blocks: blocks of host memory, 0 for none.
        event_buffer_max_size: events kept for a reader; the oldest are dropped first; 0 for no events.
        enable_partial_reuse: the last block of a prompt is reused in part.
        prometheus: `return_perf_metrics: true`.
        describes_itself: it has `/openapi.json`.
        tells_block_size: `/server_info` has the block size.
        renders: `TRTLLM_ENABLE_RENDER_ENDPOINTS=1`.
        reset_path: route that resets the cache, None if there is none.
        tells_lora: blocks in events have this field.
        tells_partial: a prompt's last block is reported even if it is not full.
        pushes: `kv_events_config` of KVCacheManagerV2: events go out over ZMQ, and none can be polled.
        replays: it has a `replay_endpoint`.
        of_functions: the fields that its model of a function has.
        numbers_phases: `disaggregated_params` have `disagg_request_id`.
        kv_transfer_timeout_s: how long it keeps a prompt's KV for another server, and waits for that of one.
    """

    model: str = "tiny"
    tokens_per_block: int = 32
    gpu_blocks: int = 64
    host_blocks: int = 0
    event_buffer_max_size: int = 16384
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = False
    max_model_len: int = 2048
    prometheus: bool = True
    describes_itself: bool = True
    tells_block_size: bool = True
    renders: bool = True
    reset_path: str | None = "/reset_prefix_cache"
    tells_lora: bool = False
    tells_partial: bool = True
    pushes: bool = False
    replays: bool = False
    of_functions: tuple[str, ...] = ("name", "description", "parameters", "strict")
    numbers_phases: bool = True
    kv_transfer_timeout_s: float = 60.0
    version: str = "1.4.0"

    @property
    def params(self) -> tuple[str, ...]:
        return tuple(name for name in PARAMS if self.numbers_phases or name != "disagg_request_id")


class EventBuffer:
    """The events of one server, collected until the end of a step and kept until they are read."""

    def __init__(self, options: TrtllmOptions) -> None:
        self._options = options
        self.counts: Counter[str] = Counter()
        self._next = 0
        self._step: list[dict] = []
        self._kept: deque[dict] = deque(maxlen=options.event_buffer_max_size)
        self._names: dict[int, None] = {}
        self._partial: int | None = None
        self.tell(
            {"type": "created", "num_blocks_per_cache_level": [options.gpu_blocks, options.host_blocks]}
        )
        self.flush()

    def __len__(self) -> int:
        return len(self._kept)

    def tell(self, data: dict) -> None:
        event = {"event_id": self._next, "data": data, "window_size": self._options.max_model_len}
        self._next += 1
        self._step.append(event)

    def flush(self) -> None:
        self._kept.extend(self._step)
        self._step.clear()

    def drain(self) -> list[dict]:
        events = list(self._kept)
        self._kept.clear()
        return events

    def lose(self, count: int) -> None:
        """Loses the next events, as if another reader had taken them."""
        for _ in range(count):
            self._kept.popleft()

    def stored(self, run: StoredRun) -> None:
        size = self._options.tokens_per_block
        self._names.update(dict.fromkeys(run.hashes))
        blocks = [
            self._block(name, run.tokens[at * size : (at + 1) * size], run.namespace, run.media[at])
            for at, name in enumerate(run.hashes)
        ]
        self.tell({"type": "stored", "parent_hash": run.parent, "blocks": blocks})

    def partial(self, parent: int | None, tokens: tuple[int, ...], namespace: Namespace) -> None:
        """The block a prompt ends in; the one before it is gone."""
        if self._partial is not None:
            self.tell({"type": "removed", "block_hashes": [self._partial]})
        self._partial = hash((parent, tokens)) & (2**63 - 1)
        block = self._block(self._partial, tokens, namespace, ())
        self.tell({"type": "stored", "parent_hash": parent, "blocks": [block]})

    def removed(self, hashes: tuple[int, ...]) -> None:
        for name in hashes:
            self._names.pop(name)
        self.counts["removed"] += len(hashes)
        self.tell({"type": "removed", "block_hashes": list(hashes)})

    def cleared(self) -> None:
        self.removed(tuple(self._names))

    def moved(self, name: int, old: int, new: int) -> None:
        self.counts["offloaded" if new else "onboarded"] += 1
        level = {"type": "event_diff", "new_value": new, "old_value": old}
        self.tell({"type": "updated", "block_hash": name, "cache_level": level, "priority": None})

    def _block(self, name: int, tokens: tuple[int, ...], namespace: Namespace, media: tuple) -> dict:
        block = {
            "type": "stored_block",
            "block_hash": name,
            "tokens": [{"type": "unique_token", "token_id": t, "token_extra_id": 0} for t in tokens],
            "cache_level": 0,
            "priority": 35,
            "mm_keys": [
                {"type": "mm_key", "hash": identity, "start_offset": max(-offset, 0)}
                for identity, offset in media
            ],
        }
        block["cache_salt"] = namespace.salt
        if self._options.tells_lora:
            block["lora_id"] = int(namespace.lora) if namespace.lora is not None else None
        return block


class EventPusher(EventBuffer):
    """The events that KVCacheManagerV2 pushes: of full blocks, without salts, adapters, or moves."""

    def __init__(self, options: TrtllmOptions, publisher: Publisher) -> None:
        self._publisher = publisher
        self._batch: list[object] = []
        super().__init__(options)

    def tell(self, data: dict) -> None:
        """Nothing is buffered."""

    def stored(self, run: StoredRun) -> None:
        self._names.update(dict.fromkeys(run.hashes))
        event = {
            "type": "BlockStored",
            "block_hashes": [signed(name) for name in run.hashes],
            "parent_block_hash": None if run.parent is None else signed(run.parent),
            "token_ids": list(run.tokens),
            "block_size": self._options.tokens_per_block,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        self._batch.append(event)

    def partial(self, parent: int | None, tokens: tuple[int, ...], namespace: Namespace) -> None:
        """Partial blocks are not told."""

    def removed(self, hashes: tuple[int, ...]) -> None:
        super().removed(hashes)
        names = [signed(name) for name in hashes]
        self._batch.append({"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"})

    def flush(self) -> None:
        batch, self._batch = self._batch, []
        self._publisher.publish(batch)


class OffloadingCache(PageCache):
    """A page cache over host memory: what leaves the GPU keeps its place in the tree while there is room.

    Attributes:
        on_host: hashes of the pages that lie there.
    """

    listener: EventBuffer

    def __init__(self, options: TrtllmOptions, events: EventBuffer) -> None:
        super().__init__(options.tokens_per_block, options.gpu_blocks)
        self.listener = events
        self._options = options
        self.on_host: set[int] = set()

    @property
    def on_gpu(self) -> int:
        return len(self._pages) - len(self.on_host)

    def begin(self, prompt: CachePrompt, *, read: bool = True) -> RunningPrompt:
        reuses = read and self._options.enable_block_reuse
        if reuses:
            self._onboard(self._matched(prompt))
        in_part = self._options.enable_partial_reuse and reuses and self._holds_last(prompt)
        running = super().begin(prompt, read=reuses)
        if in_part:
            running.cached_tokens = len(prompt.tokens) - 1
        whole = len(running.hashes) * self.page_size
        tail = prompt.tokens[whole : whole + self.page_size]
        if self._options.tells_partial and 0 < len(tail) < self.page_size:
            self.listener.partial(running.hashes[-1] if running.hashes else None, tail, prompt.namespace)
        return running

    def put(self, name: int, parent: _Page | None) -> _Page | None:
        if not self._options.enable_block_reuse:
            return None
        if self.on_gpu >= self.capacity and not self._evict_one():
            return None
        page = self._pages[name] = _Page(name, parent)
        if parent is not None:
            parent.children += 1
        return page

    def reset(self) -> bool:
        done = super().reset()
        if done:
            self.on_host.clear()
        return done

    def _holds_last(self, prompt: CachePrompt) -> bool:
        hashes: list[int] = []
        for at in range(-(-len(prompt.tokens) // self.page_size)):
            hashes.append(self.hash_of(prompt, at, hashes[-1] if hashes else None))
        return len(prompt.tokens) % self.page_size == 0 and all(name in self._pages for name in hashes)

    def _onboard(self, pages: list[_Page]) -> None:
        for page in pages:
            page.users += 1
        for page in pages:
            if page.hash in self.on_host:
                assert self.on_gpu < self.capacity or self._evict_one()
                self.on_host.discard(page.hash)
                self.listener.moved(page.hash, 1, 0)
        for page in pages:
            page.users -= 1

    def _evict_one(self) -> bool:
        """The longest unused page that has no child on the GPU: to host memory, else away."""
        inner = {
            page.parent.hash for name, page in self._pages.items() if page.parent and self._is_on_gpu(name)
        }
        for page in list(self._pages.values()):
            if page.users or not self._is_on_gpu(page.hash) or page.hash in inner:
                continue
            if self._has_host_room():
                self.on_host.add(page.hash)
                self.listener.moved(page.hash, 0, 1)
                return True
            if not page.children:
                self._drop(page)
                return True
        return False

    def _is_on_gpu(self, name: int) -> bool:
        return name not in self.on_host

    def _has_host_room(self) -> bool:
        if len(self.on_host) < self._options.host_blocks:
            return True
        leaves = (p for n, p in self._pages.items() if n in self.on_host and not p.users and not p.children)
        leaf = next(leaves, None)
        if leaf is not None:
            self._drop(leaf)
        return leaf is not None

    def _drop(self, page: _Page) -> None:
        del self._pages[page.hash]
        self.on_host.discard(page.hash)
        if page.parent is not None:
            page.parent.children -= 1
        self.listener.removed((page.hash,))


@dataclass(frozen=True, slots=True)
class KeptPrompt:
    """A prompt whose KV a server keeps for another one, until `ends`, in monotonic seconds."""

    server: FakeTrtllm
    tokens: tuple[int, ...]
    ends: float


class FakeTrtllm:
    """One server.

    Attributes:
        seen: bodies of the chats and completions it served, each with its route.
        polls: times its events were asked for.
        steps: what its steps did, taken away by reading `/metrics`.
        fetched: prompt tokens whose KV it fetched from other servers.
        ends_at_once: the first token of each answer of a context phase ends it.
        refuses_kv: generation phases are refused, as by a server whose key for them is another one.
        publisher: pushes its events; None where they are polled.
    """

    kept: ClassVar[dict[int, KeptPrompt]] = {}
    """Context phases whose KV no server has fetched, of all servers, by their numbers."""

    def __init__(self, options: TrtllmOptions) -> None:
        self.options = options
        self.fetched = 0
        self.ends_at_once = self.refuses_kv = False
        self.seen: list[tuple[str, dict]] = []
        self.polls = 0
        self.steps: list[dict] = []
        self.publisher = Publisher(topic="", replay=options.replays) if options.pushes else None
        words()  # loads the tokenizer, which takes seconds: not while a client waits
        self.restart()
        self.app = Starlette(routes=list(self.routes()))

    def restart(self) -> None:
        """As another process at the same address: an empty cache, events from 0 on."""
        if self.publisher is None:
            self.events = EventBuffer(self.options)
        else:
            if self.publisher.published:
                self.publisher.restart()
            self.events = EventPusher(self.options, self.publisher)
        self.cache = OffloadingCache(self.options, self.events)
        self.core = EngineCore(self.cache, end_of_step=self._end_of_step)

    def _end_of_step(self) -> None:
        self.events.flush()
        cache = {"maxNumBlocks": self.cache.capacity, "usedNumBlocks": self.cache.used}
        cache["tokensPerBlock"] = self.options.tokens_per_block
        step = {"numActiveRequests": self.core.running, "numQueuedRequests": self.core.waiting}
        self.steps.append(step | {"kvCacheStats": cache})

    @property
    def told(self) -> Counter[str]:
        """Blocks that were `removed`, `offloaded` and `onboarded` since the process began."""
        return self.events.counts

    # --- routes ---------------------------------------------------------------------------------------

    def routes(self) -> Iterator[Route]:
        options = self.options
        yield Route("/health", lambda _: Response())
        yield Route("/version", lambda _: JSONResponse({"version": options.version}))
        yield Route("/v1/models", self._models)
        yield Route("/server_info", self._server_info)
        yield Route("/metrics", self._iterations)
        yield Route("/kv_cache_events", self._drain, methods=["POST"])
        if options.prometheus:
            yield Route("/prometheus/metrics", lambda _: PlainTextResponse(self.metrics()))
        if options.describes_itself:
            yield Route("/openapi.json", lambda _: JSONResponse(self._openapi()))
        if options.reset_path is not None:
            yield Route(options.reset_path, self._reset, methods=["POST"])
        for path, read in ((CHAT, self._chat_prompt), (COMPLETIONS, self._text_prompt)):
            yield Route(path, self._serve(path, read), methods=["POST"])
            if options.renders:
                yield Route(f"{path}/render", self._render(path, read), methods=["POST"])

    async def _models(self, _: Request) -> Response:
        card = {"id": self.options.model, "object": "model", "created": 1, "owned_by": "tensorrt_llm"}
        return JSONResponse({"object": "list", "data": [card]})

    async def _server_info(self, _: Request) -> Response:
        info: dict = {"disaggregated_params": None, "kv_cache_hash_algo": "block_key"}
        if self.options.tells_block_size:
            info["tokens_per_block"] = self.options.tokens_per_block
        return JSONResponse(info)

    async def _iterations(self, _: Request) -> Response:
        steps, self.steps = self.steps, []
        return JSONResponse(steps)

    async def _drain(self, _: Request) -> Response:
        self.polls += 1
        return JSONResponse(self.events.drain() if self.options.event_buffer_max_size else [])

    async def _reset(self, _: Request) -> Response:
        self.core.reset()
        self.events.flush()
        return JSONResponse({"status": "success"})

    def _openapi(self) -> dict:
        paths = {route.path: route for route in self.app.routes if "POST" in (route.methods or ())}
        described = {path: {"post": {}} for path in paths}
        schemas = {}
        for path, fields in FIELDS.items():
            name = "ChatCompletionRequest" if path == CHAT else "CompletionRequest"
            reference = {"$ref": f"#/components/schemas/{name}"}
            content = {"application/json": {"schema": reference}}
            described[path] = {"post": {"requestBody": {"content": content}}}
            schemas[name] = {
                "properties": {field: {} for field in sorted(fields)},
                "additionalProperties": False,
            }
        schemas["DisaggregatedParams"] = {"properties": {name: {} for name in self.options.params}}
        schemas["FunctionDefinition"] = {"properties": {name: {} for name in self.options.of_functions}}
        return {"openapi": "3.1.0", "paths": described, "components": {"schemas": schemas}}

    def _render(self, path: str, read: Callable[[dict], CachePrompt]) -> Callable:
        async def render(request: Request) -> Response:
            try:
                prompt = read(await _body(path, request))
            except _RefusedError as refused:
                return refused.answer()
            rendered = {"kind": "chat", "token_ids": list(prompt.tokens), "tokens_trusted": True}
            return JSONResponse(rendered if path == CHAT else [rendered | {"kind": "completion"}])

        return render

    def _serve(self, path: str, read: Callable[[dict], CachePrompt]) -> Callable:
        async def serve(request: Request) -> Response:
            try:
                body = await _body(path, request)
                prompt = read(body)
            except _RefusedError as refused:
                return refused.answer()
            self.seen.append((path, body))
            work, params = self._work(path, body, prompt), body.get("disaggregated_params")
            if params is None:
                return await answer(self.core, work)
            try:
                self._check_params(params)
                if params["request_type"] == "context_only":
                    return await self._context(work, params)
                return await self._generation(work, params)
            except _RefusedError as refused:
                return refused.answer()

        return serve

    def _check_params(self, params: dict) -> None:
        if unknown := sorted(params.keys() - {*self.options.params}):
            raise _RefusedError(f"extra_forbidden: {unknown}", flat=False)
        if params["request_type"] == "generation_only" and self.refuses_kv:
            raise _RefusedError("Invalid internal disaggregated request authentication")

    async def _context(self, work: Work, params: dict) -> Response:
        """Computes the prompt and one token, and keeps the KV, unless that token is the last one."""
        done = await answer(self.core, replace(work, max_tokens=1))
        told, tokens = json.loads(bytes(done.body)), work.prompt.tokens
        choice = told["choices"][0]
        choice["finish_reason"] = "length" if work.max_tokens == 1 else "not_finished"
        told["prompt_token_ids"] = list(tokens)
        if self.ends_at_once:
            choice["finish_reason"] = "stop"
            return JSONResponse(told)
        number = params["disagg_request_id"]
        self.kept[number] = KeptPrompt(self, tokens, time.monotonic() + self.options.kv_transfer_timeout_s)
        choice["disaggregated_params"] = dict.fromkeys(self.options.params) | {
            "request_type": "context_only",
            "first_gen_tokens": [output_token(work.prompt, 0)],
            "ctx_request_id": number,
            "disagg_request_id": number,
            "encoded_opaque_state": "AAAA",
        }
        return JSONResponse(told)

    async def _generation(self, work: Work, params: dict) -> Response:
        """Fetches the KV, which is gone from then on, and answers from the first token on. Without KV, it
        waits in vain, and its answer breaks off."""
        await self.core.turn()
        kept = self.kept.pop(params["disagg_request_id"], None)
        if kept is None or kept.ends < time.monotonic():
            return _broken_off(self.options.kv_transfer_timeout_s)
        if kept.tokens != work.prompt.tokens or params["first_gen_tokens"] != [output_token(work.prompt, 0)]:
            raise _RefusedError("this is not what the context phase computed")
        self.fetched += len(kept.tokens)
        usage = params.get("ctx_usage") or {"prompt_tokens_details": {"cached_tokens": 0}}
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return await answer(
            self.core, replace(work, usage=lambda prompt, output, _: _usage(prompt, output, cached))
        )

    def close(self) -> None:
        self.core.release()
        if self.publisher is not None:
            self.publisher.close()

    def die(self) -> None:
        """Nobody finds what it kept for others."""
        for number, kept in list(self.kept.items()):
            if kept.server is self:
                del self.kept[number]

    def _work(self, path: str, body: dict, prompt: CachePrompt) -> Work:
        return Work(
            chat=path == CHAT,
            model=self.options.model,
            prompt=prompt,
            max_tokens=body.get("max_completion_tokens") or body.get("max_tokens") or 16,
            usage=_usage,
            stream=bool(body.get("stream")),
            include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        )

    def _chat_prompt(self, body: dict) -> CachePrompt:
        tokens = body.get("prompt_token_ids")
        if tokens is None:
            options = dict(body.get("chat_template_kwargs") or {})
            if body.get("add_generation_prompt") is not None:
                options["add_generation_prompt"] = body["add_generation_prompt"]
            try:
                tokens = chat_tokens(body["messages"], self._dumped(body.get("tools")), **options)
            except Exception as error:
                raise _RefusedError(str(error)) from error
        return self._prompt(body, tokens)

    def _dumped(self, tools: list[dict] | None) -> list[dict] | None:
        """The tools with all fields of its models, as its chat template gets them."""
        return tools and [
            {"type": "function", "function": dict.fromkeys(self.options.of_functions) | tool["function"]}
            for tool in tools
        ]

    def _text_prompt(self, body: dict) -> CachePrompt:
        prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = encode(prompt, add_special_tokens=body.get("add_special_tokens", True))
        return self._prompt(body, prompt)

    def _prompt(self, body: dict, tokens: list[int]) -> CachePrompt:
        if len(tokens) >= self.options.max_model_len:
            raise _RefusedError(f"should not exceed max_seq_len {self.options.max_model_len}")
        lora = body.get("lora_request")
        adapter = str(lora["lora_int_id"]) if lora else None
        return CachePrompt(tuple(tokens), Namespace(body.get("cache_salt"), adapter))

    def metrics(self) -> str:
        """The Prometheus page, with some of what else stands there."""
        options = self.options
        labels = f'model_name="{options.model}",engine_type="pytorch"'
        values = {
            "num_requests_running": self.core.running,
            "num_requests_waiting": self.core.waiting,
            "kv_cache_max_blocks": options.gpu_blocks,
            "kv_cache_used_blocks": self.cache.used,
            "kv_cache_tokens_per_block": options.tokens_per_block,
            "kv_cache_hit_rate": float("nan"),
        }
        lines = [f"trtllm_{name}{{{labels}}} {value}" for name, value in values.items()]
        cache = f'enable_block_reuse="{options.enable_block_reuse}"'
        cache += f',enable_partial_reuse="{options.enable_partial_reuse}",free_gpu_memory_fraction="0.9"'
        lines.append(f"trtllm_kv_cache_config_info{{{labels},{cache}}} 1.0")
        model = f'model="/models/{options.model}",max_model_len="{options.max_model_len}"'
        lines.append(f"trtllm_model_config_info{{{labels},{model}}} 1.0")
        return "\n".join(lines) + "\n"


class _RefusedError(Exception):
    """`flat`: in the shape of the server's own errors; else in that of its validation."""

    def __init__(self, message: str, *, flat: bool = True) -> None:
        super().__init__(message)
        self._flat = flat

    def answer(self) -> Response:
        error = {
            "object": "error",
            "message": str(self),
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        }
        return JSONResponse(error if self._flat else {"error": str(self)}, 400)


async def _body(path: str, request: Request) -> dict:
    """The body; any field the route does not know is an error."""
    try:
        body = json.loads(await request.body())
    except ValueError as error:
        raise _RefusedError(f"JSON decode error: {error}", flat=False) from error
    path = path.removesuffix("/render")
    unknown = sorted(set(body) - FIELDS[path])
    errors = [{"type": "extra_forbidden", "loc": ("body", name)} for name in unknown]
    required = {"model", "messages" if path == CHAT else "prompt"}
    errors += [{"type": "missing", "loc": ("body", name)} for name in sorted(required - set(body))]
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or options.keys() - {"include_usage", "continuous_usage_stats"}:
        errors.append({"type": "extra_forbidden", "loc": ("body", "stream_options")})
    if options and not body.get("stream"):
        errors.append(
            {"type": "value_error", "msg": "Stream options can only be defined when stream is true."}
        )
    if errors:
        raise _RefusedError(str(errors), flat=False)
    return body


def _broken_off(after_s: float) -> StreamingResponse:
    """An answer that begins with nothing, and ends so."""

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.sleep(after_s)
        raise OSError("Error in kv cache transfer for generation requests")
        yield b""

    return StreamingResponse(nothing(), media_type="text/event-stream")


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    usage["total_tokens"] = prompt_tokens + completion_tokens
    return usage | {"prompt_tokens_details": {"cached_tokens": cached_tokens}}


RunningTrtllm = Running


def running_trtllm(**options) -> AbstractContextManager[Running]:
    """A fake server with these `TrtllmOptions`, on a free port."""
    return running(FakeTrtllm(TrtllmOptions(**options)))
