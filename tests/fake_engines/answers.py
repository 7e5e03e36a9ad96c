"""Chat and text completions of a fake engine, as JSON and as a real event stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.fake_engines.cache import CachePrompt
from tests.fake_engines.core import EngineCore
from tests.fake_engines.text import decode


@dataclass(frozen=True, slots=True)
class Work:
    """A parsed request.

    Attributes:
        chat: a chat rather than a text completion.
        read: False if it must not reuse anything.
        usage: prompt, completion and cached tokens → the answer's `usage`.
        n: choices, all alike.
    """

    chat: bool
    model: str
    prompt: CachePrompt
    max_tokens: int
    usage: Callable[[int, int, int], dict]
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    read: bool = True
    n: int = 1

    @property
    def object(self) -> str:
        if self.chat:
            return "chat.completion.chunk" if self.stream else "chat.completion"
        return "text_completion"

    def envelope(self, choices: list[dict], **fields: object) -> dict:
        head = {"id": "cmpl-1", "object": self.object, "created": 1, "model": self.model}
        return {**head, "choices": choices, **fields}


async def answer(core: EngineCore, work: Work) -> Response:
    if work.stream:
        return event_stream(chunks(core, work))
    async with core.generate(work.prompt, work.max_tokens, read=work.read) as generation:
        tokens = [token async for token in generation.output]
    text = {"message": {"role": "assistant", "content": decode(tokens)}}
    choice = {"index": 0, **(text if work.chat else {"text": decode(tokens)}), "finish_reason": "length"}
    top: dict = {}
    if work.return_token_ids:
        choice["token_ids"] = tokens
        (top if work.chat else choice)["prompt_token_ids"] = list(work.prompt.tokens)
    usage = work.usage(generation.prompt_tokens, len(tokens) * work.n, generation.cached_tokens)
    return JSONResponse(work.envelope([choice | {"index": n} for n in range(work.n)], usage=usage, **top))


def event_stream(events: AsyncIterator[dict], *, named: bool = False) -> StreamingResponse:
    """`named`: each event has its type before it, and the last one ends the stream."""

    async def lines() -> AsyncIterator[bytes]:
        async for event in events:
            name = f"event: {event['type']}\n".encode() if named else b""
            yield name + b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
        if not named:
            yield b"data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


async def chunks(core: EngineCore, work: Work) -> AsyncIterator[dict]:
    prompt_ids = {"prompt_token_ids": list(work.prompt.tokens)} if work.return_token_ids else {}
    async with core.generate(work.prompt, work.max_tokens, read=work.read) as generation:
        if work.chat:
            first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            for index in range(work.n):
                yield work.envelope([first | {"index": index}], **prompt_ids)
        count = 0
        async for token in generation.output:
            count += 1
            choice = {"index": 0, "finish_reason": "length" if count == work.max_tokens else None}
            choice |= {"delta": {"content": decode([token])}} if work.chat else {"text": decode([token])}
            if work.return_token_ids:
                choice["token_ids"] = [token]
                choice |= prompt_ids if count == 1 and not work.chat else {}
            for index in range(work.n):
                yield work.envelope([choice | {"index": index}])
        if work.include_usage:
            usage = work.usage(generation.prompt_tokens, count * work.n, generation.cached_tokens)
            yield work.envelope([], usage=usage)
