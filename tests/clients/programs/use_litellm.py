"""litellm, through `openai/` and `anthropic/` models."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import litellm
from features import LONG, PIXEL_URL, SCHEMA, TOOL, World, main, stoppable
from plain import plain

TOOLS = [{"type": "function", "function": TOOL}]


async def chat_of(world: World, messages: str | list[Any], **changes: Any) -> Any:
    asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    options = {"model": f"openai/{world.model}", "api_key": world.key, "max_retries": 0, "timeout": 60}
    return await litellm.acompletion(
        base_url=world.base_url, messages=asked, **{**options, "max_tokens": 16, "temperature": 0, **changes}
    )


async def ask(world: World, prompt: str, **changes: Any) -> str:
    if "model" in changes:
        changes["model"] = f"openai/{changes['model']}"
    return (await chat_of(world, prompt, **changes)).choices[0].message.content


async def pieces(world: World, prompt: str) -> AsyncIterator[str]:
    stream = await chat_of(world, prompt, stream=True)
    try:
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content
    finally:
        await stream.completion_stream.close()


globals().update(plain(ask, pieces))


async def usage(world: World) -> None:
    prompt = world.fresh()
    whole = (await chat_of(world, prompt)).usage
    assert whole.total_tokens == whole.prompt_tokens + whole.completion_tokens
    asked = await chat_of(world, prompt, stream=True, stream_options={"include_usage": True})
    told = [chunk.usage async for chunk in asked if getattr(chunk, "usage", None)]
    assert [each.prompt_tokens for each in told] == [whole.prompt_tokens]


async def stop(world: World) -> None:
    prompt, word = await stoppable(world, partial(ask, world))
    assert word not in (await chat_of(world, prompt, stop=[word])).choices[0].message.content


async def logprobs(world: World) -> None:
    answer = await chat_of(world, world.fresh(), logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs.content[0].logprob <= 0


async def many(world: World) -> None:
    assert len((await chat_of(world, world.fresh(), n=2)).choices) == 2


async def cached(world: World) -> None:
    first = [{"role": "user", "content": world.fresh() + LONG}]
    said = (await chat_of(world, first)).choices[0].message.content
    second = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    assert (await chat_of(world, second)).usage.prompt_tokens_details.cached_tokens > 0


async def headers(world: World) -> None:
    answer = await chat_of(world, world.fresh())
    assert answer._hidden_params["additional_headers"]["llm_provider-x-kvpin-engine"]


async def tools(world: World) -> None:
    asked = [{"role": "user", "content": world.wish("call-tool")[0]}]
    said = (await chat_of(world, asked, tools=TOOLS)).choices[0].message
    (call,) = said.tool_calls
    assert (call.function.name, set(json.loads(call.function.arguments))) == ("tide", {"port"})
    told = {"role": "tool", "tool_call_id": call.id, "content": "4 m"}
    text = (await chat_of(world, [*asked, said.model_dump(), told], tools=TOOLS)).choices[0].message.content
    assert text == "The tool said: 4 m"


async def stream_tools(world: World) -> None:
    got = await chat_of(world, world.wish("call-tools")[0], tools=TOOLS, stream=True)
    whole = litellm.stream_chunk_builder([chunk async for chunk in got])
    calls = whole.choices[0].message.tool_calls
    assert len(calls) == 2
    assert all(set(json.loads(call.function.arguments)) == {"port"} for call in calls)


async def schema(world: World) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "harbour", "schema": SCHEMA, "strict": True}}
    answer = await chat_of(world, world.fresh(), response_format=form, max_tokens=64)
    assert set(json.loads(answer.choices[0].message.content)) == {"port", "open"}


async def reasoning(world: World) -> None:
    message = (await chat_of(world, world.wish("think")[0])).choices[0].message
    assert (message.reasoning_content, message.content) == ("Ports have tides.", "The tide is high.")


async def embeddings(world: World) -> None:
    made = await litellm.aembedding(
        model=f"openai/{world.embedding_model}",
        input=["One", "Two"],
        api_base=world.base_url,
        api_key=world.key,
    )
    assert len(made.data) == 2


async def images(world: World) -> None:
    parts = [{"type": "text", "text": world.fresh()}, {"type": "image_url", "image_url": {"url": PIXEL_URL}}]
    assert (await chat_of(world, [{"role": "user", "content": parts}])).choices[0].message.content


async def responses(world: World) -> None:
    answer = await litellm.aresponses(
        model=f"openai/{world.model}",
        input=world.fresh(),
        max_output_tokens=16,
        api_base=world.base_url,
        api_key=world.key,
    )
    assert answer.output


async def messages(world: World) -> None:
    answer = await litellm.acompletion(
        model=f"anthropic/{world.model}",
        messages=[{"role": "user", "content": world.fresh()}],
        max_tokens=16,
        api_base=world.url,
        api_key=world.key,
    )
    assert answer.choices[0].message.content


if __name__ == "__main__":
    main()
