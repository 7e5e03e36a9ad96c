"""LangChain, with its OpenAI and its Anthropic packages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from features import LONG, PIXEL_URL, SCHEMA, TOOL, VECTOR, World, main, stoppable
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from plain import plain


def openai(world: World, **changes: Any) -> ChatOpenAI:
    options = {"model": world.model, "api_key": world.key, "max_retries": 0, "timeout": 60}
    return ChatOpenAI(base_url=world.base_url, **{**options, "max_tokens": 16, "temperature": 0, **changes})


async def ask(world: World, prompt: str, **changes: Any) -> str:
    return (await openai(world, **changes).ainvoke(prompt)).text


async def pieces(world: World, prompt: str) -> AsyncIterator[str]:
    async for chunk in openai(world).astream(prompt):
        if chunk.text:
            yield chunk.text


globals().update(plain(ask, pieces))


async def usage(world: World) -> None:
    llm, prompt = openai(world), world.fresh()
    whole = (await llm.ainvoke(prompt)).usage_metadata
    assert whole["total_tokens"] == whole["input_tokens"] + whole["output_tokens"]
    asked = [chunk async for chunk in openai(world, stream_usage=True).astream(prompt)]
    told = [chunk.usage_metadata for chunk in asked if chunk.usage_metadata]
    assert [each["input_tokens"] for each in told] == [whole["input_tokens"]]
    unasked = [chunk async for chunk in openai(world, stream_usage=False).astream(prompt)]
    assert not any(chunk.usage_metadata for chunk in unasked)


async def stop(world: World) -> None:
    prompt, word = await stoppable(world, partial(ask, world))
    assert word not in (await openai(world).ainvoke(prompt, stop=[word])).text


async def logprobs(world: World) -> None:
    answer = await openai(world, logprobs=True, top_logprobs=2).ainvoke(world.fresh())
    assert answer.response_metadata["logprobs"]["content"][0]["logprob"] <= 0


async def many(world: World) -> None:
    result = await openai(world, n=2).agenerate([[HumanMessage(world.fresh())]])
    assert len(result.generations[0]) == 2


async def cached(world: World) -> None:
    llm, first = openai(world), [HumanMessage(world.fresh() + LONG)]
    said = await llm.ainvoke(first)
    answer = await llm.ainvoke([*first, said, HumanMessage("And then?")])
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0


TOOLS = [{"type": "function", "function": TOOL}]


async def tools(world: World) -> None:
    llm = openai(world).bind_tools(TOOLS)
    asked = [HumanMessage(world.wish("call-tool")[0])]
    said = await llm.ainvoke(asked)
    (call,) = said.tool_calls
    assert (call["name"], set(call["args"])) == ("tide", {"port"})
    answer = await llm.ainvoke([*asked, said, ToolMessage("4 m", tool_call_id=call["id"])])
    assert answer.text == "The tool said: 4 m"


async def stream_tools(world: World) -> None:
    llm = openai(world).bind_tools(TOOLS)
    joined: Any = None
    async for chunk in llm.astream(world.wish("call-tools")[0]):
        joined = chunk if joined is None else joined + chunk
    assert len(joined.tool_calls) == 2
    assert all(set(call["args"]) == {"port"} for call in joined.tool_calls)


async def schema(world: World) -> None:
    form = {"title": "harbour", "description": "A harbour", **SCHEMA}
    llm = openai(world, max_tokens=64).with_structured_output(form, method="json_schema", strict=True)
    assert set(await llm.ainvoke(world.fresh())) == {"port", "open"}


async def embeddings(world: World) -> None:
    # Without this option LangChain sends token ids of OpenAI's tokenizer.
    made = OpenAIEmbeddings(
        model=world.embedding_model,
        base_url=world.base_url,
        api_key=world.key,
        check_embedding_ctx_length=False,
    )
    vectors = await made.aembed_documents(["One", "Two"])
    assert len(vectors) == 2
    assert not world.is_fake or vectors[0] == VECTOR


async def images(world: World) -> None:
    parts = [{"type": "text", "text": world.fresh()}, {"type": "image_url", "image_url": {"url": PIXEL_URL}}]
    assert (await openai(world).ainvoke([HumanMessage(parts)])).text


async def responses(world: World) -> None:
    answer = await openai(world, use_responses_api=True).ainvoke(world.fresh())
    assert answer.text
    assert answer.usage_metadata["output_tokens"]


async def responses_stream(world: World) -> None:
    llm, prompt = openai(world, use_responses_api=True), world.fresh()
    got = [chunk.text async for chunk in llm.astream(prompt)]
    assert "".join(got) == (await llm.ainvoke(prompt)).text


def anthropic(world: World, **changes: Any) -> ChatAnthropic:
    options = {"model": world.model, "api_key": world.key, "max_retries": 0, "timeout": 60}
    return ChatAnthropic(base_url=world.url, **{**options, "max_tokens": 16, **changes})


async def messages(world: World) -> None:
    llm, prompt = anthropic(world, temperature=0), world.fresh()
    whole: AIMessage = await llm.ainvoke(prompt)
    assert whole.text
    assert whole.usage_metadata["output_tokens"]
    assert "".join([chunk.text async for chunk in llm.astream(prompt)]) == whole.text


if __name__ == "__main__":
    main()
