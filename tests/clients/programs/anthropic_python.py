"""anthropic-sdk-python, with its synchronous or its asynchronous client."""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import Any

import anthropic
from features import LONG, PIXEL, TOO_LONG, TOOL_SCHEMA, EitherHalf, World, each, main, raises, stoppable

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

    async def count(self, key: str) -> int:
        """How often the fake engine saw the key."""
        return int(text_of(await self.say(f"do: count {key}")))


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


async def chat(world: World) -> None:
    message = await Client(world).say(world.fresh())
    assert (message.type, message.role) == ("message", "assistant")
    assert text_of(message)
    assert message.stop_reason in ("end_turn", "max_tokens")


async def stream(world: World) -> None:
    client, prompt = Client(world), world.fresh()
    whole = await client.say(prompt)
    events = [event async for event in each(await client.say(prompt, stream=True))]
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert "".join(delta.text for delta in deltas if delta.type == "text_delta") == text_of(whole)


async def usage(world: World) -> None:
    client, prompt = Client(world), world.fresh()
    whole = (await client.say(prompt)).usage
    assert whole.input_tokens > 0
    assert whole.output_tokens > 0
    events = [event async for event in each(await client.say(prompt, stream=True))]
    (told,) = [event.usage for event in events if event.type == "message_delta"]
    assert told.output_tokens == whole.output_tokens


async def stop(world: World) -> None:
    client = Client(world)

    async def ask(prompt: str) -> str:
        return text_of(await client.say(prompt))

    prompt, word = await stoppable(world, ask)
    message = await client.say(prompt, stop_sequences=[word])
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


async def wrong_key(world: World) -> None:
    error = await raises(anthropic.AuthenticationError, Client(world, api_key="wrong").say("Hi"))
    assert (error.body["type"], error.body["error"]["type"]) == ("error", "authentication_error")


async def no_model(world: World) -> None:
    error = await raises(anthropic.NotFoundError, Client(world).say("Hi", model="no-such-model"))
    assert (error.body["type"], error.body["error"]["type"]) == ("error", "not_found_error")


async def bad_request(world: World) -> None:
    asked = world.wish("refuse-400")[0] if world.is_fake else TOO_LONG
    error = await raises(anthropic.BadRequestError, Client(world).say(asked))
    assert (error.body["type"], error.body["error"]["type"]) == ("error", "invalid_request_error")
    assert error.body["error"]["message"]


async def rate_limit(world: World) -> None:
    prompt, key = world.wish("fail-429")
    started = time.monotonic()
    assert text_of(await Client(world, max_retries=1).say(prompt))
    assert time.monotonic() - started >= 1  # retry-after
    assert await Client(world).count(key) == 2
    error = await raises(anthropic.RateLimitError, Client(world).say(world.wish("refuse-429")[0]))
    assert error.response.headers["retry-after"] == "1"


async def server_error(world: World) -> None:
    prompt, key = world.wish("fail-503")
    assert text_of(await Client(world, max_retries=1).say(prompt))
    assert await Client(world).count(key) == 2
    await raises(anthropic.InternalServerError, Client(world).say(world.wish("refuse-500")[0]))


async def no_retry(world: World) -> None:
    prompt, key = world.wish("refuse-500-final")
    await raises(anthropic.InternalServerError, Client(world, max_retries=2).say(prompt))
    assert await Client(world).count(key) == 1


async def cancel(world: World) -> None:
    client = Client(world)
    prompt, key = world.wish("endless")
    got = await client.say(prompt, stream=True)
    async for event in each(got):
        if event.type == "content_block_delta":
            break
    closed = got.close()
    if inspect.isawaitable(closed):
        await closed
    assert text_of(await client.say(f"do: left {key}")) == "left"


async def death(world: World) -> None:
    client = Client(world)
    got: list[str] = []

    async def read() -> None:
        async for event in each(await client.say(world.wish("die")[0], stream=True)):
            got.append(event.type)

    await raises(anthropic.APIError, read())
    assert "content_block_delta" in got
    assert "message_stop" not in got
    await raises(anthropic.APIError, client.say(world.wish("die")[0]))


async def timeout(world: World) -> None:
    await raises(anthropic.APITimeoutError, Client(world, timeout=0.5).say(world.wish("hang")[0]))


async def parallel(world: World) -> None:
    if world.asynchronous:
        made = [Client(world).say(world.fresh()) for _ in range(8)]
    else:
        made = [asyncio.to_thread(lambda: asyncio.run(Client(world).say(world.fresh()))) for _ in range(8)]
    assert all(text_of(message) for message in await asyncio.gather(*made))


if __name__ == "__main__":
    main()
