"""A vLLM server without a model: its routes, its metrics page and its event sockets, as 0.32.0 has them.

It runs no model: an answer is a function of the prompt's tokens, adapter and images. Everything kvpin depends
on is as measured on the real one: what a request reuses, what is announced and when, what is refused and how.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import count

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.fake_engines.answers import Work, answer, chunks, event_stream
from tests.fake_engines.cache import CachePrompt, Namespace, PageCache, StoredRun
from tests.fake_engines.core import EngineCore, Running, running
from tests.fake_engines.images import Images
from tests.fake_engines.nixl import FakeNixl, Found
from tests.fake_engines.publisher import Publisher
from tests.fake_engines.text import MODEL_DIR, chat_tokens, encode, words

_created = count(1)


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How the server is started. Fields with a flag have its name.

    Attributes:
        root: directory or hub id of the model, as `/v1/models` names it.
        num_gpu_blocks: one of them always stays empty.
        names_sources: it has `/kv_event_sources` (0.26 and later).
        log_stats: `/metrics` has the engine's figures.
        knows_salts: it refuses an empty cache salt.
        saltless: routes that ignore it.
        tells_zero: usage reports reused tokens also if there are none.
        identity: `/metrics` says when its counters were created.
        event_ports: ports of events and replay of the first rank, 0 for any free one.
        embeds: its model makes embeddings, of one prompt of token ids, and has no routes that generate.
        nixl: it has a NixlConnector.
        kv_lease_duration: how long that keeps KV for others, in seconds.
        kv_transfer_config: what `/server_info` says, older servers as a text; None without that route, which
            only dev mode has.
    """

    model: str = "tiny"
    root: str = str(MODEL_DIR)
    loras: tuple[str, ...] = ()
    block_size: int = 16
    num_gpu_blocks: int = 129
    max_model_len: int = 1024
    ranks: int = 1
    kv_events: bool = True
    replay_endpoint: bool = True
    names_sources: bool = True
    enable_prompt_tokens_details: bool = True
    enable_prefix_caching: bool = True
    enable_scale_out: bool = True
    dev_mode: bool = True
    log_stats: bool = True
    api_key: str | None = None
    version: str = "0.32.0"
    knows_salts: bool = True
    saltless: tuple[str, ...] = ()
    tells_zero: bool = True
    identity: bool = True
    event_ports: tuple[int, int] = (0, 0)
    embeds: bool = False
    nixl: bool = False
    kv_lease_duration: float = 30.0
    kv_transfer_config: Mapping[str, object] | str | None = None


@dataclass(frozen=True, slots=True)
class EventGroup:
    """The KV cache group of an event: its number, kind, and window in tokens."""

    number: int = 0
    kind: str = "full_attention"
    window: int | None = None


ALONE = EventGroup()
"""The group of a model that has one."""


@dataclass(slots=True)
class _Events:
    """The events of one rank, collected until the end of a step."""

    publisher: Publisher
    block_size: int
    batch: list[dict] = field(default_factory=list)

    def stored(self, run: StoredRun, group: EventGroup = ALONE) -> None:
        adapter = run.namespace.lora
        keys = [list(self._keys(run, at)) or None for at in range(len(run.hashes))]
        event = {
            "type": "BlockStored",
            "block_hashes": run.hashes,
            "parent_block_hash": run.parent,
            "token_ids": run.tokens,
            "block_size": self.block_size,
            "lora_id": None if adapter is None else 1,
            "medium": "GPU",
            "lora_name": adapter,
            "extra_keys": keys,
            "group_idx": group.number,
            "kv_cache_spec_kind": group.kind,
        }
        if group.window is not None:
            event["kv_cache_spec_sliding_window"] = group.window
        self.batch.append(event)

    def removed(self, hashes: tuple[int, ...], group: EventGroup = ALONE) -> None:
        event = {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": group.number}
        self.batch.append(event)

    def cleared(self) -> None:
        self.batch.append({"type": "AllBlocksCleared"})

    def flush(self) -> None:
        batch, self.batch = self.batch, []
        self.publisher.publish(batch)

    def _keys(self, run: StoredRun, at: int) -> Iterator[object]:
        """Keys without names: LoRA adapter, items, and the salt on a prompt's first block."""
        if run.namespace.lora is not None:
            yield run.namespace.lora
        yield from run.media[at]
        if run.namespace.salt is not None and run.parent is None and at == 0:
            yield run.namespace.salt


def _of_api(path: str, chat: Response) -> Response:
    """A whole answer in the form of its route's API, with the fields of vLLM 0.32 that say something."""
    if path not in ("/v1/messages", "/v1/responses"):
        return chat
    whole = json.loads(chat.body)
    text, usage = whole["choices"][0]["message"]["content"], whole["usage"]
    if path == "/v1/responses":
        return JSONResponse(_response(whole["model"], text, usage))
    head = {"id": whole["id"], "type": "message", "role": "assistant", "model": whole["model"]}
    counts, cached = _tokens_of(usage)
    counts |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
    said = [{"type": "text", "text": text}]
    return JSONResponse(head | {"content": said, "stop_reason": "max_tokens", "usage": counts})


def _tokens_of(usage: dict) -> tuple[dict, int]:
    """Tokens in and out of an answer in the names of other APIs, and how many of them were reused."""
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}, cached


def _response(model: str, text: str, usage: dict) -> dict:
    head = {"id": "resp_1", "object": "response", "model": model, "status": "incomplete"}
    part = {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
    said = [{"id": "msg_1", "content": [part], "role": "assistant", "status": "completed", "type": "message"}]
    counts, cached = _tokens_of(usage)
    counts |= {"input_tokens_details": {"cached_tokens": cached}, "total_tokens": usage["total_tokens"]}
    return head | {"output": said, "usage": counts}


async def _response_events(core: EngineCore, work: Work) -> AsyncIterator[dict]:
    """A response as a stream: the events that say something."""
    begun = {"id": "resp_1", "object": "response", "model": work.model, "status": "in_progress"}
    yield {"type": "response.created", "response": begun | {"output": [], "usage": None}}
    text, place = "", {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    async for chunk in chunks(core, replace(work, include_usage=True)):
        for choice in chunk["choices"]:
            text += choice["delta"]["content"]
            yield {"type": "response.output_text.delta", **place, "delta": choice["delta"]["content"]}
    yield {"type": "response.completed", "response": _response(work.model, text, chunk["usage"])}


class FakeVllm:
    """One server. `cores` and `publishers` have one entry per data-parallel rank.

    Attributes:
        seen: bodies of the served chats and completions, with their rank.
        rendered: bodies it rendered.
        images: images it was sent.
    """

    def __init__(self, options: VllmOptions) -> None:
        self.options = options
        self.publishers = [
            Publisher(
                topic=f"kv@{options.model}",
                replay=options.replay_endpoint,
                rank=rank,
                ports=options.event_ports if rank == 0 else (0, 0),
            )
            for rank in range(options.ranks if options.kv_events else 0)
        ]
        self.seen: list[tuple[int, dict]] = []
        self.rendered: list[dict] = []
        self.images = Images()
        self.nixl = self._connector() if options.nixl else None
        if self.nixl is not None:
            self.nixl.open()
        words()  # loads the tokenizer now, which takes seconds, so that no client waits
        self._begin()
        self.app = Starlette(routes=list(self._routes()))

    def _connector(self) -> FakeNixl:
        return FakeNixl(self.options.kv_lease_duration)

    def restart(self) -> None:
        """Acts like a new process at the same addresses: empty cache, events from 0, new counters."""
        self._begin()
        for publisher in self.publishers:
            publisher.restart()

    def close(self) -> None:
        if self.nixl is not None:
            self.nixl.close()
        for core in self.cores:
            core.release()
        for publisher in self.publishers:
            publisher.close()

    def _begin(self) -> None:
        self.cores = [self._core(rank) for rank in range(self.options.ranks)]
        self._started = time.time() + next(_created)
        self._turn = 0

    def _core(self, rank: int) -> EngineCore:
        options = self.options
        capacity = options.num_gpu_blocks - 1 if options.enable_prefix_caching else 0
        if not self.publishers or not options.enable_prefix_caching:
            return EngineCore(PageCache(options.block_size, capacity))
        events = _Events(self.publishers[rank], options.block_size)
        return EngineCore(PageCache(options.block_size, capacity, events), end_of_step=events.flush)

    # --- routes ---------------------------------------------------------------------------------------

    def _routes(self) -> Iterator[Route]:
        options = self.options
        prompts = {
            "/v1/chat/completions": self._chat_prompt,
            "/v1/completions": self._text_prompt,
            "/v1/responses": self._response_prompt,
            "/v1/messages": self._chat_prompt,
        }
        if options.embeds:
            prompts = {"/v1/embeddings": lambda body: self._prompt(body, body["input"])}
        yield Route("/health", lambda _: Response())
        yield Route("/version", lambda _: JSONResponse({"version": options.version}))
        yield Route("/v1/models", self._guarded(self._models))
        yield Route("/metrics", self._metrics)
        yield Route("/tokenize", self._guarded(self._tokenize), methods=["POST"])
        if options.names_sources:
            yield Route("/kv_event_sources", lambda _: JSONResponse(self._sources()))
        if options.dev_mode:
            yield Route("/reset_prefix_cache", self._reset, methods=["POST"])
        if (transfer := options.kv_transfer_config) is not None:
            config = transfer if isinstance(transfer, str) else {"kv_transfer_config": transfer or None}
            yield Route("/server_info", lambda _: JSONResponse({"vllm_config": config, "vllm_env": {}}))
        for path, read in prompts.items():
            yield Route(path, self._guarded(self._serve(path, read)), methods=["POST"])
            render = self._guarded(self._render(path, read) if options.enable_scale_out else _disabled)
            yield Route(f"{path}/render", render, methods=["POST"])

    def _guarded(self, handler: Callable) -> Callable:
        """Errors in vLLM's form; checks the key where the route needs it."""

        async def guarded(request: Request) -> Response:
            key = self.options.api_key
            wants_key = key is not None and request.url.path.startswith("/v1")
            if wants_key and request.headers.get("authorization") != f"Bearer {key}":
                return JSONResponse({"error": "Unauthorized"}, 401)
            try:
                return await handler(request)
            except RefusedError as refused:
                error = {"message": str(refused), "type": "BadRequestError"}
                error |= {"param": refused.param, "code": refused.status}
                return JSONResponse({"error": error}, refused.status)

        return guarded

    async def _models(self, _: Request) -> Response:
        options = self.options
        base = {"id": options.model, "root": options.root, "parent": None}
        data = [base | {"max_model_len": options.max_model_len}]
        data += [{"id": name, "root": f"/{name}", "parent": options.model} for name in options.loras]
        return JSONResponse({"object": "list", "data": data})

    async def _tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        prompt = self._chat_prompt(body) if "messages" in body else self._text_prompt(body)
        tokens = list(prompt.tokens)
        return JSONResponse({"count": len(tokens), "max_model_len": 1024, "tokens": tokens})

    async def _reset(self, _: Request) -> Response:
        done = [core.reset() for core in self.cores]  # of every rank, whatever the others say
        return JSONResponse({"success": all(done)})

    def _sources(self) -> dict[str, dict]:
        return {
            str(rank): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": publisher.endpoint.replace("127.0.0.1", "*"),
                "replay_endpoint": publisher.replay_endpoint
                and publisher.replay_endpoint.replace("127.0.0.1", "*"),
                "buffer_steps": 10_000,
                "topic": publisher.topic,
            }
            for rank, publisher in enumerate(self.publishers)
        }

    def _render(self, path: str, read: Callable[[dict], CachePrompt]) -> Callable:
        async def render(request: Request) -> Response:
            body = await self._body(request)
            self.rendered.append(body)
            prompt = read(body)
            features = None
            if prompt.media:
                places = [{"offset": item.offset, "length": item.length} for item in prompt.media]
                hashes = [item.identity for item in prompt.media]
                features = {"mm_hashes": {"image": hashes}, "mm_placeholders": {"image": places}}
            rendered = {"request_id": "r", "token_ids": list(prompt.tokens), "features": features}
            return JSONResponse([rendered] if path == "/v1/completions" else rendered)

        return render

    def _serve(self, path: str, read: Callable[[dict], CachePrompt]) -> Callable:
        async def serve(request: Request) -> Response:
            body = await self._body(request)
            heeds_salt = self.options.knows_salts and path not in self.options.saltless
            if body.get("cache_salt") == "" and heeds_salt:
                raise RefusedError("Parameter 'cache_salt' must be a non-empty string", param="cache_salt")
            rank = self._rank(request)
            self.seen.append((rank, body))
            prompt = read(body)
            if len(prompt.tokens) >= self.options.max_model_len:
                raise RefusedError(f"context is {self.options.max_model_len} tokens", param="input_tokens")
            limit, context = _limit(body) or 0, self.options.max_model_len
            if limit > context:  # one that the prompt leaves no room for is cut, as on 0.32
                message = f"max_tokens={limit} cannot be greater than max_model_len={context}."
                raise RefusedError(message, param="max_tokens")
            core = self.cores[rank]
            if (body.get("vllm_xargs") or {}).get("kv_cache_report_mode") == "full":
                _announce_reused(core, prompt)
            work = self._work(path, body, prompt)
            transfer = body.get("kv_transfer_params") or {}
            # An answer that ends before its limit keeps nothing.
            keeps = transfer.get("do_remote_decode") and body.get("ignore_eos")
            if self.nixl is not None and keeps:
                return await self._first_leg(self.nixl, request, core, work)
            if self.nixl is not None and transfer.get("do_remote_prefill"):
                await core.turn()
                work = await self._pulled(core, work, transfer)
            if work.stream and path == "/v1/responses":
                return event_stream(_response_events(core, work), named=True)
            answered = await answer(core, work)
            return answered if work.stream else _of_api(path, answered)

        return serve

    async def _first_leg(self, nixl: FakeNixl, request: Request, core: EngineCore, work: Work) -> Response:
        """Computes a prompt and keeps its blocks, unless the client leaves."""

        async def until_left() -> None:
            await request.receive()  # the body is read: what follows is that the client is gone
            nixl.left += 1

        leaving = asyncio.create_task(until_left())
        whole = json.loads((await answer(core, work)).body)
        if leaving.done():
            nixl.aborted += 1
            return Response(status_code=499)
        leaving.cancel()
        cached = (whole["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        size, named = self.options.block_size, request.headers.get("x-request-id", "1")
        params = nixl.keep(named, len(work.prompt.tokens), cached, size)
        return JSONResponse(whole | {"kv_transfer_params": params})

    async def _pulled(self, core: EngineCore, work: Work, params: dict) -> Work:
        """A request that pulls what its engine lacks. Usage then counts no reuse at all.

        Another prompt's KV makes another answer."""
        found, prompt = await self._with_kv(core, work.prompt, params)
        if found is Found.NOTHING:
            return work
        return replace(work, prompt=prompt, usage=lambda prompt, output, _: self._usage(prompt, output, 0))

    async def _with_kv(
        self, core: EngineCore, prompt: CachePrompt, params: dict
    ) -> tuple[Found, CachePrompt]:
        """Pulls what the engine lacks of a prompt. Returns what it found, and the prompt that it has then."""
        assert self.nixl is not None
        n, size = len(prompt.tokens), self.options.block_size
        own = min(core.cache.match(prompt), (n - 1) // size * size)
        found = await self.nixl.pull(params, n - own)
        if found is Found.OTHER_KV:
            prompt = replace(prompt, tokens=prompt.tokens[::-1])
        return found, prompt

    def _work(self, path: str, body: dict, prompt: CachePrompt) -> Work:
        n = body.get("n")
        computes_all = body.get("prompt_logprobs") is not None or (
            bool(body.get("echo")) and body.get("logprobs") is not None
        )
        return Work(
            chat=path != "/v1/completions",
            model=body.get("model") or self.options.model,
            prompt=prompt,
            max_tokens=_limit(body) or 16,
            usage=self._usage,
            stream=bool(body.get("stream")),
            include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
            return_token_ids=bool(body.get("return_token_ids")),
            read=not computes_all,
            n=n if isinstance(n, int) and n > 0 else 1,
        )

    def _usage(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        usage["total_tokens"] = prompt_tokens + completion_tokens
        tells = self.options.enable_prompt_tokens_details and (self.options.tells_zero or cached_tokens)
        details = {"cached_tokens": cached_tokens, "created_cache_tokens": None, "multimodal_tokens": None}
        return usage | {"prompt_tokens_details": details if tells else None}

    # --- requests -------------------------------------------------------------------------------------

    async def _body(self, request: Request) -> dict:
        if request.headers.get("content-type") != "application/json":
            raise RefusedError("Unsupported Media Type: Only 'application/json' is allowed")
        try:
            body = json.loads(await request.body())
        except ValueError as error:
            raise RefusedError(f"JSON decode error: {error}") from error
        model = body.get("model")
        if model not in (None, self.options.model, *self.options.loras):
            raise RefusedError(f"The model `{model}` does not exist.", param="model", status=404)
        return body

    def _rank(self, request: Request) -> int:
        named = request.headers.get("x-data-parallel-rank")
        if named is not None:
            return int(named)
        self._turn = (self._turn + 1) % self.options.ranks
        return self._turn

    def _chat_prompt(self, body: dict) -> CachePrompt:
        ready = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if ready and not body.get("echo"):
            return self._prompt(body, ready)
        options = dict(body.get("chat_template_kwargs") or {})
        for name in ("add_generation_prompt", "continue_final_message"):
            if body.get(name) is not None:
                options[name] = body[name]
        if not body.get("messages"):
            raise RefusedError("Cannot apply chat template to an empty conversation.")
        try:
            messages, identities = self.images.take(body["messages"])
            tokens = chat_tokens(messages, body.get("tools"), **options)
        except Exception as error:
            raise RefusedError(str(error)) from error
        tokens, media = self.images.lay_out(tokens, identities)
        return replace(self._prompt(body, tokens), media=media)

    def _response_prompt(self, body: dict) -> CachePrompt:
        given = body.get("input")
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        return self._chat_prompt(body | {"messages": messages})

    def _text_prompt(self, body: dict) -> CachePrompt:
        prompt = body.get("prompt")
        if not prompt:
            raise RefusedError("Either prompt or prompt_embeds must be provided", param="prompt")
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            raise RefusedError("this fake takes one prompt", param="prompt")
        if isinstance(prompt, str):
            prompt = encode(prompt, add_special_tokens=body.get("add_special_tokens", True))
        return self._prompt(body, prompt)

    def _prompt(self, body: dict, tokens: list[int]) -> CachePrompt:
        adapter = body.get("model") if body.get("model") in self.options.loras else None
        return CachePrompt(tuple(tokens), Namespace(body.get("cache_salt"), adapter))

    # --- metrics --------------------------------------------------------------------------------------

    async def _metrics(self, _: Request) -> Response:
        # In the event loop, as the cache that it counts.
        return PlainTextResponse(self.metrics())

    def metrics(self) -> str:
        """The page, with some other metrics."""
        lines = ["# TYPE python_gc_objects_collected_total counter", "python_gc_objects_collected_total 3.0"]
        if self.options.identity:
            lines.append(f"process_start_time_seconds {int(self._started)}")
        if self.options.log_stats:
            by_rank = [self._metrics_of(rank, core) for rank, core in enumerate(self.cores)]
            lines += dict.fromkeys(line for same in zip(*by_rank, strict=True) for line in same)
        return "\n".join(lines) + "\n"

    def _metrics_of(self, rank: int, core: EngineCore) -> Iterator[str]:
        options, cache = self.options, core.cache
        labels = f'engine="{rank}",model_name="{options.model}"'
        values = {
            "num_requests_running": core.running,
            "num_requests_waiting": core.waiting,
            "kv_cache_usage_perc": cache.used / (options.num_gpu_blocks - 1),
            "prefix_cache_queries_total": cache.queries,
            "prefix_cache_hits_total": cache.hits,
            "num_requests_waiting_by_reason": 0,
        }
        for name, value in values.items():
            yield f"# TYPE vllm:{name} gauge"
            yield f"vllm:{name}{{{labels}}} {value}"
        if options.identity:
            yield f"vllm:prefix_cache_queries_created{{{labels}}} {self._started}"
        fetched = self.nixl.fetched if self.nixl is not None else 0
        source = 'source="external_kv_transfer"'
        yield f"vllm:prompt_tokens_by_source_total{{{labels},{source}}} {fetched}"
        config = {
            "block_size": options.block_size,
            "enable_prefix_caching": options.enable_prefix_caching,
            "engine": rank,
            "num_gpu_blocks": options.num_gpu_blocks * options.ranks,
        }
        yield "vllm:cache_config_info{" + ",".join(f'{k}="{v}"' for k, v in config.items()) + "} 1.0"


class RefusedError(Exception):
    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


async def _disabled(_: Request) -> Response:
    raise RefusedError("Scale-out endpoints are disabled. Restart with --enable-scale-out.", status=403)


def _limit(body: dict) -> int | None:
    return body.get("max_completion_tokens") or body.get("max_output_tokens") or body.get("max_tokens")


def _announce_reused(core: EngineCore, prompt: CachePrompt) -> None:
    """With `kv_cache_report_mode: full`, reports the blocks a request reuses."""
    cache, hashes = core.cache, []
    for at in range(cache.match(prompt) // cache.page_size):
        hashes.append(cache.hash_of(prompt, at, hashes[-1] if hashes else None))
    if hashes:
        cache.listener.stored(cache.run_of(prompt, 0, len(hashes), hashes))


RunningVllm = Running


def running_vllm(**options) -> AbstractContextManager[Running]:
    """A fake server with these `VllmOptions`, on free ports."""
    return running(FakeVllm(VllmOptions(**options)))
