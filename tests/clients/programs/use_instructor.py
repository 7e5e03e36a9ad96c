"""instructor, with tools and with JSON schemas, over OpenAI's and Anthropic's client."""

from __future__ import annotations

import instructor
from anthropic import AsyncAnthropic
from features import World, main, status_of
from instructor.core import IncompleteOutputException
from openai import AsyncOpenAI
from pydantic import BaseModel


class Harbour(BaseModel):
    """What the answer must be."""

    deep: bool
    open: bool


async def _make(world: World, mode: instructor.Mode, **changes: str) -> Harbour:
    options = {"api_key": world.key, **changes}
    client = instructor.from_openai(AsyncOpenAI(base_url=world.base_url, max_retries=0, **options), mode=mode)
    return await client.chat.completions.create(
        model=world.model,
        messages=[{"role": "user", "content": world.fresh()}],
        response_model=Harbour,
        max_tokens=96,
        max_retries=1,
    )


async def tools(world: World) -> None:
    assert isinstance(await _make(world, instructor.Mode.TOOLS), Harbour)


async def schema(world: World) -> None:
    assert isinstance(await _make(world, instructor.Mode.JSON_SCHEMA), Harbour)


async def stream_tools(world: World) -> None:
    client = instructor.from_openai(AsyncOpenAI(base_url=world.base_url, api_key=world.key, max_retries=0))
    got = client.chat.completions.create_partial(
        model=world.model,
        messages=[{"role": "user", "content": world.fresh()}],
        response_model=Harbour,
        max_tokens=96,
    )
    last = [part async for part in got][-1]
    assert isinstance(last.deep, bool)
    assert isinstance(last.open, bool)


async def wrong_key(world: World) -> None:
    try:
        await _make(world, instructor.Mode.TOOLS, api_key="wrong")
    except Exception as error:
        assert status_of(error) == 401, repr(error)
    else:
        raise AssertionError("no error")


async def messages(world: World) -> None:
    client = instructor.from_anthropic(
        AsyncAnthropic(base_url=world.url, api_key=world.key, max_retries=0),
        mode=instructor.Mode.ANTHROPIC_TOOLS,
    )
    try:
        made = await client.messages.create(
            model=world.model,
            messages=[{"role": "user", "content": world.fresh()}],
            response_model=Harbour,
            max_tokens=96,
        )
    except IncompleteOutputException:
        assert not world.is_fake  # real engines' noise ends at the limit of tokens
    else:
        assert isinstance(made, Harbour)


if __name__ == "__main__":
    main()
