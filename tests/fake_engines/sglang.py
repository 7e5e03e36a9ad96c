"""An SGLang server without a model: the routes, errors and event sockets of 0.5.23.

An answer is a function of the prompt's tokens and LoRA adapter. Reuse, events and their timing, request
fields and refusals follow a real server: tests/contract/test_sglang.py runs on both.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import zmq
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.fake_engines.answers import event_stream
from tests.fake_engines.cache import CachePrompt, Namespace, PageCache, StoredRun, signed
from tests.fake_engines.core import EngineCore, Generation, Running, output_token, running
from tests.fake_engines.publisher import Publisher
from tests.fake_engines.rooms import LeftError, Room, until
from tests.fake_engines.text import MODEL_DIR, chat_tokens, decode, encode, words

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_starts = count(1)


@dataclass(frozen=True, slots=True)
class SglangOptions:
    """How the server is started. Fields with a flag have its name.

    Attributes:
        capacity: pages of each rank's pool.
        routes: which of `/ready`, `/v1/loads` and `/server_info` it has; older servers lack them.
        jinja: chats are rendered by a Jinja template.
        disaggregation_mode: "prefill" or "decode" for a server that does half of each request.
        server_info: fields of `/server_info` that override those computed from the options.
    """

    model: str = "tiny"
    loras: tuple[str, ...] = ()
    page_size: int = 1
    capacity: int = 2048
    max_model_len: int = 1024
    ranks: int = 1
    kv_events: bool = True
    replay_endpoint: bool = True
    enable_cache_report: bool = True
    disable_radix_cache: bool = False
    api_key: str | None = None
    admin_api_key: str | None = None
    version: str = "0.5.23"
    routes: tuple[str, ...] = ("/ready", "/v1/loads", "/server_info")
    jinja: bool = True
    disaggregation_mode: str = "null"
    disaggregation_bootstrap_port: int = 8998
    server_info: dict[str, Any] = field(default_factory=dict)


class _Events:
    """The events of one rank, collected until the scheduler's next step.

    Attributes:
        told: pages stored and removed since the start.
    """

    def __init__(self, publisher: Publisher, page_size: int) -> None:
        self.told = [0, 0]
        self._publisher = publisher
        self._page_size = page_size
        self._batch: list[dict] = []

    def stored(self, run: StoredRun) -> None:
        self.told[0] += len(run.hashes)
        event = {
            "type": "BlockStored",
            "block_hashes": list(map(signed, run.hashes)),
            "parent_block_hash": None if run.parent is None else signed(run.parent),
            "token_ids": list(run.tokens),
            "block_size": self._page_size,
            "lora_id": None,
            "medium": "GPU",
        }
        # Events do not carry an extra key.
        told = {"cache_salt": run.namespace.salt, "lora_name": _adapter_of(run.namespace)}
        self._batch.append(event | {name: value for name, value in told.items() if value is not None})

    def removed(self, hashes: tuple[int, ...]) -> None:
        self.told[1] += len(hashes)
        names = list(map(signed, hashes))
        if self._batch and self._batch[-1]["type"] == "BlockRemoved":
            self._batch[-1]["block_hashes"] += names
        else:
            self._batch.append({"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"})

    def cleared(self) -> None:
        self._batch.append({"type": "AllBlocksCleared"})

    def publish(self) -> None:
        batch, self._batch = self._batch, []
        self._publisher.publish(batch)


# The time of a prefill. On a busy machine, two requests sent at once arrive some milliseconds apart.
_PREFILL_S = 0.005


class _Core(EngineCore):
    """Stores the pages of a prompt after its prefill, so that another prompt in the same batch computes them,
    too; and those filled by decoding when the request ends. Reports them after its answer."""

    @asynccontextmanager
    async def generate(
        self, prompt: CachePrompt, max_tokens: int, *, read: bool = True
    ) -> AsyncIterator[Generation]:
        try:
            async with super().generate(prompt, max_tokens, read=read) as generation:
                try:
                    yield generation
                finally:
                    running = generation.running
                    running.store(max(len(running.tokens) - 1, len(prompt.tokens)))
        finally:
            self.end_of_step()

    async def _output(self, prompt: CachePrompt, max_tokens: int, running: Any) -> AsyncIterator[int]:
        # Salt and extra key only change what is shared.
        shown = CachePrompt(prompt.tokens, Namespace(lora=_adapter_of(prompt.namespace)))
        for at in range(max_tokens):
            await self.turn(at)
            if at == 0:
                await asyncio.sleep(_PREFILL_S)  # requests that arrive meanwhile are in the same batch
                running.store(len(prompt.tokens))
                self.end_of_step()
            token = output_token(shown, at)
            running.tokens.append(token)
            yield token


class FakeSglang:
    """One server. `cores` and `publishers` have one entry per data-parallel rank.

    Attributes:
        seen: bodies of the served chats and completions, with their rank.
        parents: their trace contexts.
        paused: it takes no requests now.
        refuses: the status with which it answers all chats and completions; None while it serves them.
        hangs: it answers no chats and completions, and does not say so.
        aborted: requests whose client left while they waited for the other half.
    """

    def __init__(self, options: SglangOptions) -> None:
        self.options = options
        self.publishers = _publishers(options) if options.kv_events else []
        self.seen: list[tuple[int, dict]] = []
        self.parents: list[str | None] = []
        self.paused = self.hangs = False
        self.refuses: int | None = None
        self.aborted = 0
        words()  # loads the tokenizer now, which takes seconds, so that no client waits
        self._begin()
        self.app = Starlette(routes=list(self._routes()))

    def restart(self) -> None:
        """Acts like a new process at the same addresses: empty cache, events from 0."""
        for publisher in self.publishers:
            publisher.restart()
        self._begin()

    def close(self) -> None:
        for core in self.cores:
            core.release()
        for publisher in self.publishers:
            publisher.close()

    def _begin(self) -> None:
        self._start = next(_starts)
        self._turn = 0
        self.cores = [self._core(rank) for rank in range(self.options.ranks)]

    def _core(self, rank: int) -> _Core:
        options = self.options
        capacity = 0 if options.disable_radix_cache else options.capacity
        if not self.publishers or options.disable_radix_cache:
            return _Core(PageCache(options.page_size, capacity, shares_prefill=False))
        events = _Events(self.publishers[rank], options.page_size)
        events.cleared()  # its first event
        events.publish()
        cache = PageCache(options.page_size, capacity, events, shares_prefill=False)
        return _Core(cache, end_of_step=events.publish)

    # --- routes ---------------------------------------------------------------------------------------

    def _routes(self) -> Iterator[Route]:
        has = self.options.routes
        yield Route("/health", lambda _: Response())
        if "/ready" in has:
            yield Route("/ready", lambda _: Response(status_code=503 if self.paused else 200))
        path = "/server_info" if "/server_info" in has else "/get_server_info"
        yield Route(path, self._guarded(self._server_info))
        yield Route("/v1/models", self._guarded(self._models))
        if "/v1/loads" in has:
            yield Route("/v1/loads", self._guarded(self._loads))
        yield Route("/get_load", self._guarded(self._old_loads))
        yield Route("/tokenize", self._guarded(self._tokenize), methods=["POST"])
        yield Route("/flush_cache", self._guarded(self._flush, admin=True), methods=["GET", "POST"])
        for path in (CHAT, COMPLETIONS, "/v1/responses", "/v1/messages"):
            yield Route(path, self._guarded(self._serve(path)), methods=["POST"])
        yield Route("/generate", self._guarded(self._generate), methods=["POST", "PUT"])
        yield Route("/get_model_info", self._guarded(self._model_info))

    def _guarded(self, handler: Callable, *, admin: bool = False) -> Callable:
        """Errors in SGLang's flat form; checks the key where the route needs it."""
        options = self.options
        key = (options.admin_api_key or options.api_key) if admin else options.api_key

        async def guarded(request: Request) -> Response:
            if key is not None and request.headers.get("authorization") != f"Bearer {key}":
                return JSONResponse({"error": "Unauthorized"}, 401)
            try:
                return await handler(request)
            except LeftError:
                self.aborted += 1
                return Response(status_code=499)
            except _RefusedError as refused:
                error = {"object": "error", "message": str(refused), "type": "BadRequestError"}
                return JSONResponse(error | {"param": None, "code": refused.status}, refused.status)

        return guarded

    async def _server_info(self, _: Request) -> Response:
        options = self.options
        info = {
            "model_path": str(MODEL_DIR),
            "tokenizer_path": str(MODEL_DIR),
            "served_model_name": options.model,
            "page_size": options.page_size,
            "dcp_size": 1,
            "dp_size": options.ranks,
            "attn_dp_size": 1,
            "random_seed": 42,
            "api_key": options.api_key,
            "admin_api_key": options.admin_api_key,
            "enable_cache_report": options.enable_cache_report,
            "disable_radix_cache": options.disable_radix_cache,
            "enable_hierarchical_cache": False,
            "hicache_ratio": None,
            "hicache_size": 0,
            "enable_lora": bool(options.loras) or None,
            "speculative_algorithm": None,
            "completion_template": None,
            "disaggregation_mode": options.disaggregation_mode,
            "disaggregation_bootstrap_port": options.disaggregation_bootstrap_port,
            "disaggregation_transfer_backend": "nixl",
            "disaggregation_decode_enable_radix_cache": False,
            "kv_events_config": json.dumps({"publisher": "zmq"}) if options.kv_events else None,
            "status": "ready",
            "max_total_num_tokens": options.capacity * options.page_size,
            "max_req_input_len": options.max_model_len - 5,
            "kv_events": self._publisher_info(),
            "startup_time": {"load_weight": 0.5 + self._start, "tokenizer_e2e": 1.25},
            "internal_states": [{"effective_max_running_requests_per_dp": 8}] * options.ranks,
            "version": options.version,
            "frontend": "python",
        }
        return JSONResponse(info | options.server_info)

    def _publisher_info(self) -> dict | None:
        if not self.publishers:
            return None
        first = self.publishers[0]
        info = {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": _port(first.endpoint),
            "topic": first.topic,
            "block_size": self.options.page_size,
            "dp_size": self.options.ranks,
        }
        return (
            info
            if first.replay_endpoint is None
            else info | {"replay_endpoint_port_base": _port(first.replay_endpoint)}
        )

    async def _models(self, _: Request) -> Response:
        options = self.options
        card = {"object": "model", "created": 1, "owned_by": "sglang"}
        base = {"id": options.model, "root": options.model, "parent": None}
        data = [card | base | {"max_model_len": options.max_model_len}]
        for name in options.loras:
            adapter = {"id": name, "root": f"/{name}", "parent": options.model, "max_model_len": None}
            data.append(card | adapter)
        return JSONResponse({"object": "list", "data": data})

    async def _loads(self, _: Request) -> Response:
        loads = [
            {
                "timestamp": time.time(),
                "dp_rank": rank,
                "num_running_reqs": core.running,
                "num_waiting_reqs": core.waiting,
                "num_used_tokens": core.cache.used * self.options.page_size,
                "max_total_num_tokens": self.options.capacity * self.options.page_size,
                "token_usage": core.cache.used / self.options.capacity,
                "cache_hit_rate": core.cache.hits / max(core.cache.queries, 1),
                "total_prefill_uncached_tokens": core.cache.queries - core.cache.hits,
            }
            for rank, core in enumerate(self.cores)
        ]
        return JSONResponse({"timestamp": "t", "version": self.options.version, "loads": loads})

    async def _old_loads(self, _: Request) -> Response:
        return JSONResponse(
            [
                {
                    "dp_rank": rank,
                    "num_reqs": core.running + core.waiting,
                    "num_waiting_reqs": core.waiting,
                    "num_tokens": core.cache.used,
                }
                for rank, core in enumerate(self.cores)
            ]
        )

    async def _flush(self, request: Request) -> Response:
        """Each rank is flushed once it is idle, or not within the time-out. The rank that is first tells."""
        deadline = time.monotonic() + float(request.query_params.get("timeout", 0))
        waiting, flushed = list(self.cores), list[bool]()
        while waiting:
            for core in list(waiting):
                is_idle = not (core.running or core.waiting)
                if is_idle or time.monotonic() >= deadline:
                    waiting.remove(core)
                    flushed.append(is_idle and core.reset())
                    core.end_of_step()
            await asyncio.sleep(0.005)
        if not flushed[0]:
            return PlainTextResponse("Flush cache failed.\n", 400)
        return PlainTextResponse("Cache flushed.\nPlease check backend logs for more details. ")

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        if body.get("stream"):
            raise _RefusedError("OpenAIServingTokenize does not support streaming requests", 501)
        if (body.get("prompt") is None) == (body.get("messages") is None):
            raise _RefusedError("Exactly one of 'prompt' or 'messages' must be provided.")
        if body.get("messages") is not None:
            if body.get("add_generation_prompt") is not None and not self.options.jinja:
                raise _RefusedError("add_generation_prompt is supported only with a Jinja chat template.")
            tokens = self._chat_tokens(body, add_generation_prompt=body.get("add_generation_prompt"))
        elif isinstance(body["prompt"], str):
            tokens = encode(body["prompt"], add_special_tokens=body.get("add_special_tokens", True))
        else:
            tokens = [encode(prompt) for prompt in body["prompt"]]
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": 1024})

    # --- requests -------------------------------------------------------------------------------------

    def _serve(self, path: str) -> Callable:
        async def serve(request: Request) -> Response:
            try:
                body = await request.json()
            except ValueError as error:
                raise _RefusedError(str(error)) from error
            rank = self._rank(request, body)
            self.seen.append((rank, body))
            self.parents.append(request.headers.get("traceparent"))
            tokens = self._text_tokens(body) if path == COMPLETIONS else self._chat_tokens(body)
            if self.options.server_info.get("allow_auto_truncate"):
                tokens = tokens[: self.options.max_model_len - 5]
            if len(tokens) >= self.options.max_model_len:
                raise _RefusedError(
                    f"The input ({len(tokens)} tokens) is longer than the model's context length "
                    f"({self.options.max_model_len} tokens)."
                )
            prompt = CachePrompt(tuple(tokens), self._namespace(path, body))
            room = await self._room(request, body, rank)
            if room is not None and self._is("prefill"):
                body |= {"max_tokens": 1, "max_completion_tokens": 1}
            told = room.cached if room is not None else None
            answer = _Answer(self.cores[rank], self.options, path, body, prompt, told)
            if body.get("stream"):
                return event_stream(answer.chunks())
            whole = JSONResponse(await answer.whole())
            if room is not None and self._is("prefill"):
                room.cached = answer.cached
            return whole

        return serve

    def _is(self, mode: str) -> bool:
        return self.options.disaggregation_mode == mode

    async def _room(self, request: Request, body: dict, rank: int) -> Room | None:
        """The room in which a half of a request has met the other one; None for a server that is whole.

        A prefill server enters rooms of its own bootstrap server, and a decode server those of the one that
        is named. Where that has several ranks, it looks for the prompt at the one of the room's remainder."""
        if self._is("null"):
            return None
        if body.get("bootstrap_room") is None:
            raise _RefusedError("Disaggregated request received without bootstrap room id")
        if self.refuses is not None:
            raise _RefusedError("out of order", self.refuses)
        number, options = body["bootstrap_room"], self.options
        if self._is("prefill"):
            room = Room.of("127.0.0.1", options.disaggregation_bootstrap_port, number)
            is_found = number % options.ranks == rank
            await until(request, lambda: is_found and room.has_decoder and not self.hangs)
        else:
            room = Room.of(body["bootstrap_host"], body["bootstrap_port"], number)
            room.has_decoder = True
            is_one = (body.get("n") or 1) == 1
            await until(request, lambda: room.cached is not None and is_one and not self.hangs)
        return room

    async def _generate(self, request: Request) -> Response:
        """One prompt. As in 0.5.23, each event of a stream has the whole text so far."""
        body = await request.json()
        rank = self._rank(request, body, header=None)
        self.seen.append((rank, body))
        tokens = body["input_ids"] if body.get("input_ids") is not None else encode(body["text"])
        namespace = self._namespace("/generate", body)
        limit = (body.get("sampling_params") or {}).get("max_new_tokens", 128)
        room = await self._room(request, body, rank)
        told = room.cached if room is not None else None
        if room is not None and self._is("prefill"):
            limit = 1

        async def answers() -> AsyncIterator[dict]:
            text = ""
            async with self.cores[rank].generate(CachePrompt(tuple(tokens), namespace), limit) as generation:
                cached = generation.cached_tokens if told is None else told
                async for token in generation.output:
                    text += decode([token])
                    meta = {"id": "g-1", "finish_reason": None, "prompt_tokens": len(tokens)}
                    yield {"text": text, "meta_info": meta | {"cached_tokens": cached}}

        if body.get("stream"):
            return event_stream(answers())
        last = [answer async for answer in answers()][-1]
        if room is not None and self._is("prefill"):
            room.cached = last["meta_info"]["cached_tokens"]
        return JSONResponse(last)

    async def _model_info(self, _: Request) -> Response:
        return JSONResponse({"model_path": self.options.model, "is_generation": True})

    def _rank(self, request: Request, body: dict, *, header: str | None = "x-data-parallel-rank") -> int:
        """The rank that a request names: in a header of other servers, in one of clients, or in its body."""
        named = request.headers.get(header, None) if header is not None else None
        named = body.get("routed_dp_rank") if named is None else named
        named = request.headers.get("x-override-routed-dp-rank", named)
        if named is None:
            self._turn = (self._turn + 1) % self.options.ranks
            return self._turn
        if not 0 <= int(named) < self.options.ranks:
            raise _RefusedError(f"routed_dp_rank={named} out of range [0, {self.options.ranks})")
        return int(named)

    def _chat_tokens(self, body: dict, *, add_generation_prompt: bool | None = None) -> list[int]:
        if body.get("input_ids") is not None:
            return body["input_ids"]
        messages = body.get("messages")
        if not messages:
            raise _RefusedError("Messages cannot be empty.")
        if any(set(message) - {"role", "content", "tool_calls", "tool_call_id"} for message in messages):
            raise _RefusedError("a message of no known form")
        options = dict(body.get("chat_template_kwargs") or {})
        last = messages[-1]
        if last["role"] == "assistant" and isinstance(last["content"], str) and add_generation_prompt is None:
            # Without continue_final_message, the last message counts as the user's.
            messages = (
                messages[:-1]
                if body.get("continue_final_message")
                else [*messages[:-1], {"role": "user", "content": last["content"]}]
            )
        tools = body.get("tools") if body.get("tool_choice") != "none" else None
        try:
            tokens = chat_tokens(
                list(map(_given, messages)),
                tools and list(map(_given_tool, tools)),
                **options,
                add_generation_prompt=add_generation_prompt is not False,
            )
        except Exception as error:
            raise _RefusedError(str(error)) from error
        if body.get("continue_final_message") and last["role"] == "assistant":
            tokens += encode(last["content"], add_special_tokens=False)
        return tokens

    def _text_tokens(self, body: dict) -> list[int]:
        prompt = body.get("prompt")
        if not prompt:
            raise _RefusedError("Prompt cannot be empty")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        return encode(prompt) if isinstance(prompt, str) else prompt

    def _namespace(self, path: str, body: dict) -> Namespace:
        """`Namespace.lora` holds extra key and LoRA adapter. SGLang joins them into one string that ends
        with the LoRA adapter's number."""
        if path == "/v1/messages":
            return Namespace()
        for name in ("extra_key", "cache_salt"):
            if not isinstance(body.get(name), str | None):
                raise _RefusedError(f"{name} should be a string for a single request.")
        adapter = self._adapter(body)
        beside = (body.get("extra_key") or None, adapter)
        return Namespace(body.get("cache_salt") or None, beside if any(beside) else None)

    def _adapter(self, body: dict) -> str | None:
        model = body.get("model", "default")
        name = body.get("lora_path")
        if ":" in model and model != self.options.model:
            own = model.startswith(f"{self.options.model}:")
            name = model[len(self.options.model) + 1 :] if own else model.split(":", 1)[1]
        if name is not None and name not in self.options.loras:
            raise _RefusedError(f"The following requested LoRA adapters are not loaded: {name}")
        return name


@dataclass(slots=True)
class _Answer:
    """The answer of one request, whole or as a stream.

    Attributes:
        cached: prompt tokens that it says were reused: those that the other half of the request told, or its
            own of the first choice.
    """

    core: _Core
    options: SglangOptions
    path: str
    body: dict
    prompt: CachePrompt
    cached: int | None = None

    async def whole(self) -> dict:
        choices = []
        async for index, generation in self._generations():
            tokens = [token async for token in generation.output]
            self.cached = cached = generation.cached_tokens if self.cached is None else self.cached
            choices.append(self._choice(index, decode(tokens)))
        answer = {"id": "c-1", "object": self._object, "created": 1, "model": self._model}
        answer |= {"choices": choices, "usage": self._usage(cached), "metadata": None}
        extension = self._extension(cached)
        return answer if extension is None else answer | {"sglext": extension}

    async def chunks(self) -> AsyncIterator[dict]:
        cached = self.cached
        async for index, generation in self._generations():
            cached = generation.cached_tokens if cached is None else cached
            if self._is_chat:
                yield self._chunk([self._delta(index, role="assistant", content="")])
            async for token in generation.output:
                yield self._chunk([self._delta(index, content=decode([token]))])
            yield self._chunk([self._delta(index, finish="length")])
        extension = self._extension(cached)
        if extension is not None:
            yield self._chunk([], usage=None, sglext=extension)
        if (self.body.get("stream_options") or {}).get("include_usage"):
            yield self._chunk([], usage=self._usage(cached))

    async def _generations(self) -> AsyncIterator[tuple[int, Generation]]:
        """One after the other. With several, the prompt is computed once before them."""
        samples = self.body.get("n") or 1
        reads_prompt = not self._is_chat and self.body.get("echo") and self.body.get("logprobs")
        if samples > 1:
            async with self.core.generate(self.prompt, 0):
                pass
        for index in range(samples):
            async with self.core.generate(self.prompt, self._limit, read=not reads_prompt) as generation:
                yield index, generation

    @property
    def _is_chat(self) -> bool:
        return self.path != COMPLETIONS

    @property
    def _limit(self) -> int:
        return self.body.get("max_completion_tokens") or self.body.get("max_tokens") or 16

    @property
    def _model(self) -> str:
        return self.body.get("model", "default")

    @property
    def _object(self) -> str:
        return "chat.completion" if self._is_chat else "text_completion"

    def _choice(self, index: int, text: str) -> dict:
        end = {"logprobs": None, "finish_reason": "length", "matched_stop": None}
        if not self._is_chat:
            return {"index": index, "text": (self._echo if self.body.get("echo") else "") + text} | end
        message = {"role": "assistant", "content": text, "reasoning_content": None}
        ids = self.prompt.tokens if self.body.get("return_prompt_token_ids") else None
        return {"index": index, "message": message} | end | ({"prompt_token_ids": ids} if ids else {})

    @property
    def _echo(self) -> str:
        prompt = self.body["prompt"]
        return prompt if isinstance(prompt, str) else decode(prompt)

    def _delta(
        self, index: int, *, role: str | None = None, content: str | None = None, finish: str | None = None
    ) -> dict:
        end = {"logprobs": None, "finish_reason": finish, "matched_stop": None}
        if not self._is_chat:
            return {"index": index, "text": content or ""} | end
        told = {name: value for name, value in (("role", role), ("content", content)) if value is not None}
        return {"index": index, "delta": {"reasoning_content": None} | told} | end

    def _chunk(self, choices: list[dict], **more: object) -> dict:
        """Chunks of a completion have null for usage, those of a chat leave it out."""
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        head = {"id": "c-1", "object": kind, "created": 1, "model": self._model, "choices": choices}
        return head | ({} if self._is_chat else {"usage": None}) | more

    def _usage(self, cached: int | None) -> dict:
        count = self._limit * (self.body.get("n") or 1)
        n_prompt = len(self.prompt.tokens)
        details = {"cached_tokens": cached} if self.options.enable_cache_report else None
        return {
            "prompt_tokens": n_prompt,
            "total_tokens": n_prompt + count,
            "completion_tokens": count,
            "prompt_tokens_details": details,
            "reasoning_tokens": 0,
        }

    def _extension(self, cached: int | None) -> dict | None:
        """Sent only if the prompt reused something."""
        if not self.body.get("return_cached_tokens_details") or not cached:
            return None
        details = {"cached_tokens_details": {"device": cached, "host": 0}}
        whole = self.body.get("n", 1) > 1 and not self.body.get("stream")
        return details | ({"spec_tokens_details": []} if whole else {})


class _RefusedError(Exception):
    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def _given(message: dict) -> dict:
    """A message as templates get it."""
    content = message.get("content")
    if isinstance(content, list):
        content = " ".join(part["text"] for part in content)
    given = message | {"content": "" if content is None else content}
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        given["tool_calls"] = [
            {"id": call.get("id"), "index": None, "type": "function", "function": call["function"]}
            for call in calls
        ]
    return given


def _given_tool(tool: dict) -> dict:
    """A tool as templates get it: all fields of its model."""
    function = tool["function"]
    missing = [name for name in ("description", "parameters") if name not in function]
    return {
        "type": "function",
        "function": function | dict.fromkeys(missing),
        "defer_loading": None,
    }


class RunningSglang(Running):
    """A fake on real sockets."""

    def told(self, rank: int = 0) -> list[int]:
        """Pages that events of a rank stored and removed since the start."""
        return self.fake.cores[rank].cache.listener.told


@contextmanager
def running_sglang(**options) -> Iterator[RunningSglang]:
    """A fake server with these `SglangOptions`, on free ports."""
    with running(FakeSglang(SglangOptions(**options))) as server:
        yield RunningSglang(server.url, server.fake)


def _publishers(options: SglangOptions) -> list[Publisher]:
    """One a rank, on consecutive ports."""
    replay = options.replay_endpoint
    while True:
        made = [Publisher(topic="", replay=replay)]
        first = made[0].endpoint, made[0].replay_endpoint
        try:
            for rank in range(1, options.ranks):
                ports = (_port(first[0]) + rank, _port(first[1]) + rank if first[1] else 0)
                made.append(Publisher(topic="", replay=replay, rank=rank, ports=ports))
        except zmq.ZMQError:  # a port is in use: try others
            for publisher in made:
                publisher.close()
        else:
            return made


def _adapter_of(namespace: Namespace) -> str | None:
    """The LoRA adapter of a namespace as `FakeSglang` makes them."""
    return namespace.lora[1] if namespace.lora is not None else None


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])
