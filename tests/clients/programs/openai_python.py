"""openai-python, with its synchronous or its asynchronous client."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import openai
from features import (
    LONG,
    PIXEL_URL,
    SCHEMA,
    TOOL,
    VECTOR,
    EitherHalf,
    World,
    each,
    main,
    stoppable,
)
from plain import plain


class Client(EitherHalf):
    """One of the two clients."""

    def __init__(self, world: World, **changes: Any) -> None:
        make = openai.AsyncOpenAI if world.asynchronous else openai.OpenAI
        options = {"base_url": world.base_url, "api_key": world.key, "max_retries": 0, "timeout": 60}
        super().__init__(world, make(**{**options, **changes}))

    async def chat(self, prompt: str | list[Any], **fields: Any) -> Any:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        asked = {"model": self._world.model, "messages": messages, "max_tokens": 16, "temperature": 0}
        return await self("chat.completions.create", **{**asked, **fields})

    async def respond(self, prompt: str | list[Any], **fields: Any) -> Any:
        asked = {"model": self._world.model, "input": prompt, "max_output_tokens": 16}
        return await self("responses.create", **{**asked, **fields})


async def ask(world: World, prompt: str, **changes: Any) -> str:
    fields = {"model": changes.pop("model")} if "model" in changes else {}
    return (await Client(world, **changes).chat(prompt, **fields)).choices[0].message.content or ""


async def pieces(world: World, prompt: str) -> AsyncIterator[str]:
    async with aclosing(each(await Client(world).chat(prompt, stream=True))) as chunks:
        async for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content


def check(error: Any) -> None:
    assert error.body["message"]
    if error.status_code == 401:
        assert error.code == "invalid_api_key"
    if error.status_code == 404:
        assert (error.code, error.param) == ("model_not_found", "model")
    if error.status_code == 429:
        assert error.response.headers["retry-after"] == "1"


globals().update(plain(ask, pieces, check, before_death=("The tide ",)))


async def models(world: World) -> None:
    client = Client(world)
    listed = await client("models.list")
    assert world.model in [model.id for model in listed.data]
    assert (await client("models.retrieve", world.model)).id == world.model


async def usage(world: World) -> None:
    client, prompt = Client(world), world.fresh()
    whole = (await client.chat(prompt)).usage
    assert whole.total_tokens == whole.prompt_tokens + whole.completion_tokens
    asked = await client.chat(prompt, stream=True, stream_options={"include_usage": True})
    last = [chunk async for chunk in each(asked)][-1]
    assert (last.choices, last.usage.prompt_tokens) == ([], whole.prompt_tokens)
    unasked = [chunk async for chunk in each(await client.chat(prompt, stream=True))]
    assert all(chunk.usage is None and chunk.choices for chunk in unasked)


async def stop(world: World) -> None:
    prompt, word = await stoppable(world, partial(ask, world))
    answer = (await Client(world).chat(prompt, stop=[word])).choices[0]
    assert (word in answer.message.content, answer.finish_reason) == (False, "stop")


async def parallel(world: World) -> None:
    def one() -> str:
        return asyncio.run(ask(world, world.fresh()))

    made = (ask(world, world.fresh()) if world.asynchronous else asyncio.to_thread(one) for _ in range(8))
    assert all(await asyncio.gather(*made))


async def many(world: World) -> None:
    answer = await Client(world).chat(world.fresh(), n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.message.content for choice in answer.choices)


async def logprobs(world: World) -> None:
    answer = await Client(world).chat(world.fresh(), logprobs=True, top_logprobs=2)
    first = answer.choices[0].logprobs.content[0]
    assert first.token
    assert first.logprob <= 0


async def cached(world: World) -> None:
    client, first = Client(world), [{"role": "user", "content": world.fresh() + LONG}]
    said = (await client.chat(first)).choices[0].message.content
    second = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    answer = await client.chat(second)
    assert answer.usage.prompt_tokens_details.cached_tokens > 0


async def headers(world: World) -> None:
    sent = {"x-request-id": world.fresh("id").replace(" ", "-")}
    raw = await Client(world)("chat.completions.with_raw_response.create", model=world.model,
        messages=[{"role": "user", "content": world.fresh()}], max_tokens=4, extra_headers=sent)  # fmt: skip
    assert raw.headers["x-request-id"] == sent["x-request-id"]
    assert raw.headers["x-kvpin-engine"]
    assert int(raw.headers["x-kvpin-predicted-tokens"]) >= 0
    parsed = raw.parse()
    parsed = await parsed if inspect.isawaitable(parsed) else parsed
    assert parsed.choices
    assert parsed._request_id == sent["x-request-id"]


TOOLS = [{"type": "function", "function": TOOL}]


async def tools(world: World) -> None:
    client = Client(world)
    asked = [{"role": "user", "content": world.wish("call-tool")[0]}]
    message = (await client.chat(asked, tools=TOOLS)).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "tide"
    assert set(json.loads(call.function.arguments)) == {"port"}
    told = {"role": "tool", "tool_call_id": call.id, "content": "4 m"}
    answer = await client.chat([*asked, message, told], tools=TOOLS)
    assert answer.choices[0].message.content == "The tool said: 4 m"


async def stream_tools(world: World) -> None:
    got = await Client(world).chat(world.wish("call-tools")[0], tools=TOOLS, stream=True)
    calls: dict[int, list[str]] = {}
    async for chunk in each(got):
        for call in (chunk.choices[0].delta.tool_calls if chunk.choices else None) or ():
            if call.function.name:
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments or ""
    assert len(calls) == 2
    assert all(name == "tide" and set(json.loads(text)) == {"port"} for name, text in calls.values())


async def schema(world: World) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "harbour", "schema": SCHEMA, "strict": True}}
    answer = await Client(world).chat(world.fresh(), response_format=form, max_tokens=64)
    assert set(json.loads(answer.choices[0].message.content)) == {"port", "open"}


async def reasoning(world: World) -> None:
    client, prompt = Client(world), world.wish("think")[0]
    message = (await client.chat(prompt)).choices[0].message
    assert (message.reasoning_content, message.content) == ("Ports have tides.", "The tide is high.")
    deltas = [chunk.choices[0].delta async for chunk in each(await client.chat(prompt, stream=True))]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Ports have tides."


async def embeddings(world: World) -> None:
    client = Client(world)
    asked = {"model": world.embedding_model, "input": ["One", "Two"]}
    floats = await client("embeddings.create", **asked, encoding_format="float")
    unsaid = await client("embeddings.create", **asked)  # the SDK asks for base64 then
    assert len(floats.data) == len(unsaid.data) == 2
    for one, other in zip(floats.data, unsaid.data, strict=True):
        assert all(abs(a - b) < 1e-6 for a, b in zip(one.embedding, other.embedding, strict=True))
    if world.is_fake:
        assert unsaid.data[0].embedding == VECTOR
    raw = await client("embeddings.with_raw_response.create", **asked, encoding_format="base64")
    text = raw.text if isinstance(raw.text, str) else raw.text()
    assert isinstance(json.loads(text)["data"][0]["embedding"], str)


async def images(world: World) -> None:
    parts = [
        {"type": "text", "text": world.fresh("What is this?")},
        {"type": "image_url", "image_url": {"url": PIXEL_URL}},
    ]
    answer = await Client(world).chat([{"role": "user", "content": parts}])
    assert answer.choices[0].message.content


async def responses(world: World) -> None:
    answer = await Client(world).respond(world.fresh())
    assert answer.output_text
    assert answer.status in ("completed", "incomplete")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


async def responses_stream(world: World) -> None:
    client, prompt = Client(world), world.fresh()
    whole = await client.respond(prompt, temperature=0)
    events = [event async for event in each(await client.respond(prompt, temperature=0, stream=True))]
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == events[-1].response.output_text == whole.output_text


async def responses_tools(world: World) -> None:
    client, prompt = Client(world), world.wish("call-tool")[0]
    tool = [{"type": "function", "strict": True, **TOOL}]
    asked = [{"role": "user", "content": prompt}]
    answer = await client.respond(asked, tools=tool)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert (call.name, set(json.loads(call.arguments))) == ("tide", {"port"})
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "4 m"}
    answer = await client.respond([*asked, *(item.model_dump() for item in answer.output), told], tools=tool)
    assert answer.output_text == "The tool said: 4 m"


async def responses_kept(world: World) -> None:
    client = Client(world)
    first = await client.respond(world.fresh() + LONG)
    assert (await client("responses.retrieve", first.id)).output_text == first.output_text
    second = await client.respond("And then?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    if not world.is_fake:
        assert second.usage.input_tokens > first.usage.input_tokens
        assert second.usage.input_tokens_details.cached_tokens > 0


if __name__ == "__main__":
    main()
