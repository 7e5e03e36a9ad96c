"""pydantic-ai, over chat completions, Responses and Anthropic Messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from anthropic import AsyncAnthropic
from features import LONG, PIXEL, World, main
from openai import AsyncOpenAI
from plain import plain
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


class Harbour(BaseModel):
    """What structured output must be."""

    deep: bool
    open: bool


def agent(
    world: World, *, model: str = "", kind: Any = OpenAIChatModel, max_tokens: int = 16, **fields: Any
) -> Agent:
    options = {"api_key": world.key, "max_retries": 0, "timeout": 60}
    options |= {name: fields.pop(name) for name in options if name in fields}
    provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=world.base_url, **options))
    settings = ModelSettings(max_tokens=max_tokens, temperature=0)
    return Agent(kind(model or world.model, provider=provider), model_settings=settings, **fields)


async def ask(world: World, prompt: str, **changes: Any) -> str:
    return (await agent(world, **changes).run(prompt)).output


async def pieces(world: World, prompt: str) -> AsyncIterator[str]:
    async with agent(world).run_stream(prompt) as run:
        async for piece in run.stream_text(delta=True, debounce_by=None):
            yield piece


globals().update(plain(ask, pieces))


async def usage(world: World) -> None:
    used = (await agent(world).run(world.fresh())).usage
    used = used() if callable(used) else used
    assert used.input_tokens > 0
    assert used.output_tokens > 0


async def cached(world: World) -> None:
    first = await agent(world).run(world.fresh() + LONG)
    second = await agent(world).run("And then?", message_history=first.all_messages())
    used = second.usage
    used = used() if callable(used) else used
    assert used.cache_read_tokens > 0


async def tools(world: World) -> None:
    made = agent(world)

    @made.tool_plain
    def tide(port: str) -> str:
        """Height of the tide."""
        return "4 m"

    answer = await made.run(world.wish("call-tool")[0])
    assert answer.output == "The tool said: 4 m"


async def stream_tools(world: World) -> None:
    made = agent(world)

    @made.tool_plain
    def tide(port: str) -> str:
        """Height of the tide."""
        return "4 m"

    async with made.run_stream(world.wish("call-tool")[0]) as run:
        assert await run.get_output() == "The tool said: 4 m"


async def schema(world: World) -> None:
    answer = await agent(world, max_tokens=96, output_type=NativeOutput(Harbour)).run(world.fresh())
    assert isinstance(answer.output, Harbour)


async def images(world: World) -> None:
    import base64

    picture = BinaryContent(base64.b64decode(PIXEL), media_type="image/png")
    assert (await agent(world).run([world.fresh(), picture])).output


async def responses(world: World) -> None:
    assert (await agent(world, kind=OpenAIResponsesModel).run(world.fresh())).output


async def messages(world: World) -> None:
    client = AsyncAnthropic(base_url=world.url, api_key=world.key, max_retries=0)
    model = AnthropicModel(world.model, provider=AnthropicProvider(anthropic_client=client))
    answer = await Agent(model, model_settings=ModelSettings(max_tokens=16)).run(world.fresh())
    assert answer.output


if __name__ == "__main__":
    main()
