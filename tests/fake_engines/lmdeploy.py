"""An LMDeploy `api_server` without a model: routes, answers and refusals of 0.18.

It answers as LMDeploy's own server does over an engine without a model: 21 requests were sent to both, and
their answers are equal. It was not compared with a server that has a model. Where the real one renews its
counts every 10 s, this one does at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.fake_engines.cache import CachePrompt, Namespace, PageCache
from tests.fake_engines.core import EngineCore, Running, running
from tests.fake_engines.text import chat_text, decode, encode, words

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SESSION_LEN = 2048
PERMISSION = {
    "id": "modelperm-1", "object": "model_permission", "created": 1, "allow_create_engine": False,
    "allow_sampling": True, "allow_logprobs": True, "allow_search_indices": True, "allow_view": True,
    "allow_fine_tuning": False, "organization": "*", "group": None, "is_blocking": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LMDeployOptions:
    """How a server is started.

    Attributes:
        caching: `--enable-prefix-caching`.
        metrics: False with `--disable-metrics`.
        adapters: names of its LoRA adapters.
        tells_cached: False as in older versions, whose usage does not tell reused tokens.
    """

    model: str = "org/tiny"
    block_tokens: int = 64
    gpu_blocks: int = 256
    caching: bool = True
    metrics: bool = True
    adapters: tuple[str, ...] = ()
    tells_cached: bool = True


class FakeLMDeploy:
    """A server.

    Attributes:
        core: its requests.
        seen: each request that it served: route, body.
        is_sleeping: between `/sleep` and `/wakeup`.
        health: its health, in its words, and their HTTP status.
    """

    def __init__(self, options: LMDeployOptions) -> None:
        self.options = options
        self.seen: list[tuple[str, dict]] = []
        words()  # loads the tokenizer, which takes seconds: not while a client waits
        self.restart()
        self.app = Starlette(routes=list(self._routes()))

    def restart(self) -> None:
        """As another process at the same address."""
        self.started, self.is_sleeping = time.time(), False
        self.health = ("healthy", "Engine is healthy.", 200)
        options = self.options
        cache = PageCache(options.block_tokens, options.gpu_blocks, shares_prefill=False)
        self.core = EngineCore(cache)

    def close(self) -> None:
        self.core.release()

    def _routes(self) -> Iterator[Route]:
        yield Route("/health", self._health)
        yield Route("/is_sleeping", lambda _: JSONResponse({"is_sleeping": self.is_sleeping}))
        yield Route("/v1/models", self._models)
        yield Route(CHAT, self._chat, methods=["POST"])
        yield Route(COMPLETIONS, self._completion, methods=["POST"])
        if self.options.metrics:
            yield Route("/metrics", lambda _: PlainTextResponse(self.page()))

    async def _health(self, _: Request) -> Response:
        status, message, code = self.health
        return JSONResponse({"status": status, "message": message}, code)

    async def _models(self, _: Request) -> Response:
        cards = [
            {"id": name, "object": "model", "created": int(time.time()), "owned_by": "lmdeploy"}
            | {"root": name, "parent": None, "permission": [PERMISSION]}
            for name in (self.options.model, *self.options.adapters)
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        if (refused := self._refused(body, "messages")) is not None:
            return refused
        if body["messages"]:
            functions = [tool["function"] for tool in body.get("tools") or []]
            tools = [{name: f.get(name) for name in ("description", "name", "parameters")} for f in functions]
            is_continued = body["messages"][-1]["role"] == "assistant"
            text = chat_text(body["messages"], tools or None, add_generation_prompt=not is_continued)
            # It goes on with a message of the assistant's.
            tokens = encode(text.removesuffix("<|im_end|>\n") if is_continued else text)
        else:
            tokens = body["input_ids"]
        return await self._served(CHAT, body, tokens)

    async def _completion(self, request: Request) -> Response:
        body = await request.json()
        if (refused := self._refused(body, "prompt")) is not None:
            return refused
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        if not all(isinstance(prompt, str) for prompt in prompts):
            return refusal(400, "Request preprocessing failed.")
        assert len(prompts) == 1, "kvpin splits several prompts"
        return await self._served(COMPLETIONS, body, encode(prompts[0]))

    def _refused(self, body: dict, required: str) -> Response | None:
        for field in ("model", required):
            if field not in body:
                return refusal(400, f"{field}: Field required")
        if self.is_sleeping:
            awake = "call POST /wakeup before inference (e.g. tags=weights&tags=kv_cache)."
            return refusal(503, f"Engine is sleeping; {awake}", "server_error")
        if body["model"] not in (self.options.model, *self.options.adapters):
            return refusal(404, f"The model {body['model']!r} does not exist.", "not_found_error")
        return None

    async def _served(self, path: str, body: dict, tokens: list[int]) -> Response:
        limit = SESSION_LEN
        if len(tokens) >= limit:
            length = f"Input length ({len(tokens)}) must be smaller than the model context length ({limit})."
            return refusal(400, length)
        self.seen.append((path, body))
        lora = None if body["model"] == self.options.model else body["model"]
        prompt = CachePrompt(tuple(tokens), Namespace(lora=lora))
        count = body.get("max_completion_tokens") or body.get("max_tokens") or limit - len(tokens)
        if body.get("stream"):
            return StreamingResponse(self._events(path, body, prompt, count), media_type="text/event-stream")
        async with self._run(prompt, count) as generation:
            output = [token async for token in generation.output]
        said = decode(output)
        if path == CHAT:
            message = {"role": "assistant", "content": said, "reasoning_content": None, "tool_calls": None}
            choice = {"index": 0, "message": message, "logprobs": None, "output_token_logprobs": None}
            choice |= {"finish_reason": "length", "output_ids": None, "routed_experts": None}
        else:
            choice = {"index": 0, "text": said, "logprobs": None, "finish_reason": "length"}
        usage = _usage(path, len(tokens), count, generation.cached_tokens)
        if not self.options.tells_cached:
            usage.pop("prompt_tokens_details", None)
        usage = {"prompt_tokens_details": None, **usage, "completion_tokens_details": None}
        answer = {**_head(path, body), "choices": [choice], "usage": usage}
        return JSONResponse(answer | {"service_tier": None} if path == CHAT else answer)

    def _run(self, prompt: CachePrompt, count: int):
        return self.core.generate(prompt, count, read=self.options.caching)

    async def _events(self, path: str, body: dict, prompt: CachePrompt, count: int) -> AsyncIterator[str]:
        """Its stream ends with a choice without text that tells why, and with the usage if asked for."""
        asked = (body.get("stream_options") or {}).get("include_usage")
        unknown = {"usage": None} if asked else {}
        head = _head(path, body, streams=True)

        def event(text: str, **ends: str) -> str:
            said = {"delta": {"role": "assistant", "content": text}} if path == CHAT else {"text": text}
            return f"data: {json.dumps({**head, 'choices': [{'index': 0, **said, **ends}], **unknown})}\n\n"

        async with self._run(prompt, count) as generation:
            async for token in generation.output:
                yield event(decode([token]))
            yield event("", finish_reason="length")
            usage = _usage(path, len(prompt.tokens), count, generation.cached_tokens)
        if asked:
            yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    def page(self) -> str:
        """Its metrics, those that kvpin reads and some others."""
        labels = f'{{engine="0",model_name="{self.options.model}"}}'
        values = {
            "num_requests_succeeded": 0.0,
            "num_api_requests_waiting": 0.0,
            "num_requests_running": self.core.running,
            "num_requests_waiting": self.core.waiting,
            "gpu_cache_usage_perc": self.core.cache.used / self.core.cache.capacity,
            "prefix_cache_hit_rate": 0.0,
            "cached_tokens_total": self.core.cache.hits if self.options.caching else 0,
        }
        lines = [f"process_start_time_seconds {self.started!r}", "lmdeploy:backend_config_info 1.0"]
        return "\n".join(
            [*lines, *(f"lmdeploy:{name}{labels} {value}" for name, value in values.items()), ""]
        )


def refusal(status: int, message: str, kind: str = "invalid_request_error") -> Response:
    """An error as its routes answer it."""
    error = {"message": message, "type": kind, "code": status, "param": None, "object": "error"}
    return JSONResponse(error, status)


def _head(path: str, body: dict, *, streams: bool = False) -> dict:
    kind = "chat.completion" if path == CHAT else "text_completion"
    name = f"{kind}.chunk" if streams and path == CHAT else kind
    answer_id = "chatcmpl-1" if path == CHAT else "-1"
    return {"id": answer_id, "object": name, "created": int(time.time()), "model": body["model"]}


def _usage(path: str, prompt: int, output: int, cached: int) -> dict:
    """Completions do not tell what was reused."""
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}
    return usage | {"prompt_tokens_details": {"cached_tokens": cached}} if path == CHAT else usage


def running_lmdeploy(**options) -> AbstractContextManager[Running]:
    """A fake server with these `LMDeployOptions`, on a free port."""
    return running(FakeLMDeploy(LMDeployOptions(**options)))
