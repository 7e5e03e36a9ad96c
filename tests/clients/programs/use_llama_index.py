"""LlamaIndex, with its class for servers like OpenAI's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

from features import PIXEL, SCHEMA, VECTOR, World, main, stoppable
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from plain import plain


def client(world: World, **changes: Any) -> OpenAILike:
    options = {"model": world.model, "api_key": world.key, "max_retries": 0, "timeout": 60}
    return OpenAILike(
        api_base=world.base_url,
        is_chat_model=True,
        is_function_calling_model=True,
        **{**options, "max_tokens": 16, "temperature": 0, **changes},
    )


async def ask(world: World, prompt: str, **changes: Any) -> str:
    return (await client(world, **changes).achat([ChatMessage(prompt)])).message.content or ""


async def pieces(world: World, prompt: str) -> AsyncIterator[str]:
    async with aclosing(await client(world).astream_chat([ChatMessage(prompt)])) as chunks:
        async for chunk in chunks:
            if chunk.delta:
                yield chunk.delta


globals().update(plain(ask, pieces))


async def usage(world: World) -> None:
    raw = (await client(world).achat([ChatMessage(world.fresh())])).raw
    assert raw.usage.total_tokens == raw.usage.prompt_tokens + raw.usage.completion_tokens


async def stop(world: World) -> None:
    prompt, word = await stoppable(world, partial(ask, world))
    assert word not in (await client(world).achat([ChatMessage(prompt)], stop=[word])).message.content


def tide(port: str) -> str:
    """Height of the tide."""
    return f"4 m at {port}"


async def tools(world: World) -> None:
    llm, tool = client(world), FunctionTool.from_defaults(tide)
    asked = ChatMessage(world.wish("call-tool")[0])
    said = await llm.achat_with_tools([tool], chat_history=[asked])
    (call,) = llm.get_tool_calls_from_response(said)
    assert (call.tool_name, set(call.tool_kwargs)) == ("tide", {"port"})
    told = ChatMessage(role="tool", content="4 m", additional_kwargs={"tool_call_id": call.tool_id})
    answer = await llm.achat_with_tools([tool], chat_history=[asked, said.message, told])
    assert answer.message.content == "The tool said: 4 m"


async def stream_tools(world: World) -> None:
    llm, tool = client(world), FunctionTool.from_defaults(tide)
    asked = ChatMessage(world.wish("call-tool")[0])
    got = await llm.astream_chat_with_tools([tool], chat_history=[asked])
    last = [chunk async for chunk in got][-1]
    (call,) = llm.get_tool_calls_from_response(last)
    assert set(call.tool_kwargs) == {"port"}


async def schema(world: World) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "harbour", "schema": SCHEMA, "strict": True}}
    llm = client(world, max_tokens=64)
    answer = await llm.achat([ChatMessage(world.fresh())], response_format=form)
    assert "port" in answer.message.content


async def embeddings(world: World) -> None:
    made = OpenAILikeEmbedding(model_name=world.embedding_model, api_base=world.base_url, api_key=world.key)
    vectors = await made.aget_text_embedding_batch(["One", "Two"])
    assert len(vectors) == 2
    assert not world.is_fake or vectors[0] == VECTOR


async def images(world: World) -> None:
    blocks = [TextBlock(text=world.fresh()), ImageBlock(image=PIXEL.encode(), image_mimetype="image/png")]
    assert (await client(world).achat([ChatMessage(role="user", blocks=blocks)])).message.content


if __name__ == "__main__":
    main()
