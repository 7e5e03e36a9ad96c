"""anthropic-sdk-python, with its synchronous or its asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import anthropic
from features import LONG, PIXEL, TOOL_SCHEMA, EitherHalf, World, each, main, stoppable
from plain import plain

TOOLS = [{"name": "tide", "description": "Height of the tide", "input_schema": TOOL_SCHEMA}]


class Client(EitherHalf):
    """One of the two clients."""

    def __init__(self, world: World, **changes: Any) -> None:
        make = anthropic.AsyncAnthropic if world.asynchronous else anthropic.Anthropic
        options = {"base_url": world.url, "api_key": world.key, "max_retries": 0, "timeout": 60}
        super().__init__(world, make(**{**options, **changes}))

    async def say(self, prompt: str | list[Any], **fields: Any) -> Any:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        asked = {"model": self._world.model, "messages": messages, "max_tokens": 16}
        greedy = {"temperature": 0}  # the SDK's own methods no longer take it
        return await self("messages.create", **{**asked, **fields}, extra_body=greedy)


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


async def ask(world: World, prompt: str, **changes: Any) -> str:
    fields = {"model": changes.pop("model")} if "model" in changes else {}
    return text_of(await Client(world, **changes).say(prompt, **fields))


async def pieces(world: World, prompt: str) -> AsyncIterator[str]:
    async with aclosing(each(await Client(world).say(prompt, stream=True))) as events:
        async for event in events:
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                yield event.delta.text


def check(error: Any) -> None:
    types = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
    told = error.body["error"]
    assert (error.body["type"], types.get(error.status_code, told["type"])) == ("error", told["type"])
    assert told["message"]
    if error.status_code == 429:
        assert error.response.headers["retry-after"] == "1"


globals().update(plain(ask, pieces, check, before_death=("The tide ",)))


async def usage(world: World) -> None:
    client, prompt = Client(world), world.fresh()
    whole = (await client.say(prompt)).usage
    assert whole.input_tokens > 0
    assert whole.output_tokens > 0
    events = [event async for event in each(await client.say(prompt, stream=True))]
    (told,) = [event.usage for event in events if event.type == "message_delta"]
    assert told.output_tokens == whole.output_tokens


async def stop(world: World) -> None:
    prompt, word = await stoppable(world, partial(ask, world))
    message = await Client(world).say(prompt, stop_sequences=[word])
    assert word not in text_of(message)
    assert message.stop_reason in ("stop_sequence", "end_turn")


async def cached(world: World) -> None:
    client, first = Client(world), [{"role": "user", "content": world.fresh() + LONG}]
    said = text_of(await client.say(first))
    second = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    used = (await client.say(second, system="")).usage
    assert used.cache_read_input_tokens > 0


async def headers(world: World) -> None:
    raw = await Client(world)("messages.with_raw_response.create", model=world.model, max_tokens=4,
        messages=[{"role": "user", "content": world.fresh()}])  # fmt: skip
    assert raw.headers["x-request-id"]
    assert raw.headers["x-kvpin-engine"]


async def tools(world: World) -> None:
    client, asked = Client(world), [{"role": "user", "content": world.wish("call-tool")[0]}]
    said = await client.say(asked, tools=TOOLS)
    (call,) = [block for block in said.content if block.type == "tool_use"]
    assert (call.name, set(call.input), said.stop_reason) == ("tide", {"port"}, "tool_use")
    told = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "4 m"}]}
    answer = await client.say([*asked, {"role": "assistant", "content": said.content}, told], tools=TOOLS)
    assert text_of(answer) == "The tool said: 4 m"


async def stream_tools(world: World) -> None:
    client, prompt = Client(world), world.wish("call-tools")[0]
    asked = {"model": world.model, "max_tokens": 96, "messages": [{"role": "user", "content": prompt}]}
    manager = client._client.messages.stream(**asked, tools=TOOLS)
    if world.asynchronous:
        async with manager as got:
            message = await got.get_final_message()
    else:
        with manager as got:
            message = got.get_final_message()
    calls = [block for block in message.content if block.type == "tool_use"]
    assert len(calls) == 2
    assert all((call.name, set(call.input)) == ("tide", {"port"}) for call in calls)


async def reasoning(world: World) -> None:
    message = await Client(world).say(world.wish("think")[0])
    thought = [block.thinking for block in message.content if block.type == "thinking"]
    assert (thought, text_of(message)) == (["Ports have tides."], "The tide is high.")


async def images(world: World) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    parts = [{"type": "text", "text": world.fresh()}, {"type": "image", "source": source}]
    assert text_of(await Client(world).say([{"role": "user", "content": parts}]))


async def count_tokens(world: World) -> None:
    client, prompt = Client(world), world.fresh()
    messages = [{"role": "user", "content": prompt}]
    counted = await client("messages.count_tokens", model=world.model, messages=messages)
    used = (await client.say(prompt)).usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


async def parallel(world: World) -> None:
    def one() -> str:
        return asyncio.run(ask(world, world.fresh()))

    made = (ask(world, world.fresh()) if world.asynchronous else asyncio.to_thread(one) for _ in range(8))
    assert all(await asyncio.gather(*made))


if __name__ == "__main__":
    main()
