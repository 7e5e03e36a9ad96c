"""The OpenAI Agents SDK, over chat completions and over Responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from agents import (
    Agent,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.items import ToolCallItem, ToolCallOutputItem
from features import World, main
from openai import AsyncOpenAI
from plain import plain
from pydantic import BaseModel

set_tracing_disabled(True)


class Harbour(BaseModel):
    """What structured output must be."""

    port: bool
    open: bool


@function_tool
def tide(port: str) -> str:
    """Height of the tide."""
    return "4 m"


def agent(world: World, *, responses: bool = False, settings: Any = None, **fields: Any) -> Agent:
    options = {"api_key": world.key, "max_retries": 0, "timeout": 60}
    options |= {name: fields.pop(name) for name in options if name in fields}
    kind = OpenAIResponsesModel if responses else OpenAIChatCompletionsModel
    model = kind(
        fields.pop("model", world.model), openai_client=AsyncOpenAI(base_url=world.base_url, **options)
    )
    return Agent(
        name="a",
        model=model,
        model_settings=settings or ModelSettings(max_tokens=16, temperature=0),
        **fields,
    )


async def ask(world: World, prompt: str, **changes: Any) -> str:
    return (await Runner.run(agent(world, **changes), prompt)).final_output


async def pieces(world: World, prompt: str) -> AsyncIterator[str]:
    run = Runner.run_streamed(agent(world), prompt)
    try:
        async for event in run.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                yield event.data.delta
    finally:
        run.cancel()


globals().update(plain(ask, pieces))


async def usage(world: World) -> None:
    run = await Runner.run(agent(world), world.fresh())
    used = run.context_wrapper.usage
    assert used.total_tokens == used.input_tokens + used.output_tokens > 0


async def tools(world: World) -> None:
    await _tools(world, responses=False)


async def responses_tools(world: World) -> None:
    await _tools(world, responses=True)


async def _tools(world: World, *, responses: bool) -> None:
    run = await Runner.run(agent(world, responses=responses, tools=[tide]), world.wish("call-tool")[0])
    kinds = [type(item) for item in run.new_items]
    assert ToolCallItem in kinds
    assert ToolCallOutputItem in kinds
    assert run.final_output == "The tool said: 4 m"


async def stream_tools(world: World) -> None:
    run = Runner.run_streamed(agent(world, tools=[tide]), world.wish("call-tool")[0])
    async for _ in run.stream_events():
        pass
    assert ToolCallOutputItem in [type(item) for item in run.new_items]


async def schema(world: World) -> None:
    made = agent(world, output_type=Harbour, settings=ModelSettings(max_tokens=64))
    assert isinstance((await Runner.run(made, world.fresh())).final_output, Harbour)


async def responses(world: World) -> None:
    with noise_is_incomplete(world):
        assert (await Runner.run(agent(world, responses=True), world.fresh())).final_output


async def responses_stream(world: World) -> None:
    run, pieces = Runner.run_streamed(agent(world, responses=True), world.fresh()), []
    with noise_is_incomplete(world):
        async for event in run.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                pieces.append(event.data.delta)
        assert "".join(pieces) == run.final_output
    assert pieces


@contextmanager
def noise_is_incomplete(world: World) -> Iterator[None]:
    """Real engines' noise ends at the limit of tokens, which the SDK takes for an error over Responses."""
    try:
        yield
    except ModelBehaviorError as error:
        if world.is_fake or "max_output_tokens" not in str(error):
            raise


if __name__ == "__main__":
    main()
