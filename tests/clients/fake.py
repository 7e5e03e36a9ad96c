"""An engine that misbehaves on request, for the client matrix. It speaks chat completions and embeddings.

The last user message says what happens: `SCENARIO KEY`. The key counts a client's attempts:

    fail-503 k1      the first attempt gets that status, the next ones an answer
    refuse-400 k1    every attempt gets that status; `refuse-500-final` adds `x-should-retry: false`
    die k1           a stream that breaks off, and an answer that never ends
    hang k1          no answer at all
    endless k1       a stream without an end
    count k1         answers how often `k1` was asked for before
    left k1          answers once the client of `k1` has left
    call-tool k1     a call of the first tool; after the tool's result, a text that quotes it
    call-tools k1    two calls at once
    think k1         reasoning, then an answer
    edit k1          aider's block that changes `hello` to `goodbye` in hello.txt
    touch k1         a call of the agent's shell that makes the file made.txt
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import struct
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.fakes import CHAT, DONE, Exchange, FakeEngine, answer, event

MODEL = "m"
VECTOR = (0.25, -0.5, 1.0)
"""What every text is embedded as: each number is exact in 32 bits."""

TEXT = "The tide is high."
REASONING = "Ports have tides."
USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 4,
    "total_tokens": 44,
    "prompt_tokens_details": {"cached_tokens": 32},
}
EDIT = "hello.txt\n```\n<<<<<<< SEARCH\nhello\n=======\ngoodbye\n>>>>>>> REPLACE\n```\n"

type_of = {"string": "Brest", "integer": 4, "number": 4.5, "boolean": True, "null": None}


class Script:
    """Answers requests, and remembers who asked for what."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.left: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def __call__(self, exchange: Exchange) -> None:
        route = exchange.target.partition("?")[0]
        if route == CHAT:
            await self._chat(exchange)
        elif route == "/v1/embeddings":
            await _embed(exchange)
        elif exchange.method == "GET":
            await answer(exchange)
        else:
            await exchange.send({"error": {"message": f"no route {route}", "type": "not_found"}}, 404)

    async def _chat(self, exchange: Exchange) -> None:
        body = exchange.json
        scenario, key = _wish(body["messages"])
        earlier = self.asked[key]
        verb, _, status = scenario.partition("-")
        if verb in ("fail", "refuse", "die", "hang", "endless"):
            self.asked[key] += 1
        if verb == "refuse" or (verb == "fail" and not earlier):
            return await _refuse(exchange, status)
        if verb == "hang":
            await exchange.left.wait()
        elif verb in ("die", "endless"):
            await self._unfinished(exchange, verb, key)
        elif verb == "count":
            await _say(exchange, {"content": str(earlier)})
        elif verb == "left":
            await asyncio.wait_for(self.left[key].wait(), 30)
            await _say(exchange, {"content": "left"})
        else:
            await _say(exchange, _message(body, scenario))
        return None

    async def _unfinished(self, exchange: Exchange, verb: str, key: str) -> None:
        if exchange.json.get("stream"):
            await exchange.start()
            for word in ("The ", "tide "):
                await exchange.chunk(_chunk({"role": "assistant", "content": word}))
        else:
            await exchange.start(200, [("content-type", "application/json"), ("content-length", "1000")])
            await exchange.chunk(b'{"id":')
        if verb == "die":
            await asyncio.sleep(0.05)  # what was written reaches the client first
            return exchange.die(abort=True)
        try:
            while not exchange.left.is_set():
                if exchange.json.get("stream"):
                    await exchange.chunk(_chunk({"content": "and "}))
                await asyncio.sleep(0.02)
        finally:
            self.left[key].set()
        return None


def _wish(messages: list[dict[str, Any]]) -> tuple[str, str]:
    """Scenario and key: the first words of a line of the user's that begins with `do: `, the last one."""
    lines = [
        line.partition("do: ")[2].split()
        for message in messages
        if message["role"] == "user"
        for line in _text(message["content"]).splitlines()
        if "do: " in line
    ]
    scenario, key, *_ = lines[-1] if lines else ("answer", "none")
    return scenario, key


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "") for part in content or ())


def _message(body: dict[str, Any], scenario: str) -> dict[str, Any]:
    """The assistant's message."""
    if body["messages"][-1]["role"] == "tool":
        return {"content": f"The tool said: {_text(body['messages'][-1]['content'])}"}
    forced = body.get("tool_choice") not in (None, "auto", "none")
    functions = [tool["function"] for tool in body.get("tools") or ()]
    if scenario == "touch":
        return {"content": None, "tool_calls": [_shell_call(functions)]}
    if functions and (forced or scenario.startswith("call-tool")):
        calls = [_call(functions[0], number) for number in range(2 if scenario == "call-tools" else 1)]
        return {"content": None, "tool_calls": calls}
    if scenario == "think":
        return {"reasoning_content": REASONING, "content": TEXT}
    return {"content": EDIT if scenario == "edit" else _answer(body)}


def _answer(body: dict[str, Any]) -> str:
    """What it says: JSON if that is asked for, else one sentence up to the first stop sequence."""
    form = body.get("response_format") or {}
    if form.get("type") == "json_schema":
        return json.dumps(_example(form["json_schema"]["schema"]))
    stop = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
    return TEXT.partition(stop[0])[0] if stop else TEXT


def _call(function: dict[str, Any], number: int) -> dict[str, Any]:
    return _call_with(function, _example(function.get("parameters") or {"type": "object"}), number)


def _shell_call(functions: list[dict[str, Any]]) -> dict[str, Any]:
    """A call of the function that runs commands: the first that takes one."""
    for function in functions:
        for name, schema in function["parameters"].get("properties", {}).items():
            if name in ("cmd", "command"):
                words = ["touch", "made.txt"]
                return _call_with(function, {name: words if schema["type"] == "array" else " ".join(words)})
    raise AssertionError(f"no shell among {[function['name'] for function in functions]}")


def _call_with(function: dict[str, Any], arguments: Any, number: int = 0) -> dict[str, Any]:
    called = {"name": function["name"], "arguments": json.dumps(arguments)}
    return {"id": f"call_{number}", "type": "function", "function": called}


def _example(schema: dict[str, Any], root: dict[str, Any] | None = None) -> Any:
    """A value of a JSON schema."""
    root = root or schema
    if "$ref" in schema:
        return _example(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    for one_of in ("enum", "anyOf"):
        if one_of in schema:
            first = schema[one_of][0]
            return first if one_of == "enum" else _example(first, root)
    kind = schema.get("type", "object")
    if kind == "array":
        return [_example(schema.get("items", {"type": "string"}), root)]
    if kind == "object":
        return {name: _example(part, root) for name, part in schema.get("properties", {}).items()}
    return type_of[kind]


async def _say(exchange: Exchange, message: dict[str, Any]) -> None:
    body = exchange.json
    message = {"role": "assistant", **message}
    calls = message.get("tool_calls")
    finish = "tool_calls" if calls else "stop"
    logprobs = {"content": [_logprob(word) for word in (message["content"] or "").split()]}
    if body.get("stream"):
        chunks = [_chunk(delta) for delta in _deltas(message)]
        chunks.append(_chunk({}, finish_reason=finish))
        if (body.get("stream_options") or {}).get("include_usage"):
            chunks.append(event({**_head("chat.completion.chunk"), "choices": [], "usage": USAGE}))
        return await exchange.stream(*chunks, DONE)
    choices = [
        {
            "index": number,
            "message": message,
            "finish_reason": finish,
            "logprobs": logprobs if body.get("logprobs") else None,
        }
        for number in range(body.get("n") or 1)
    ]
    return await exchange.send({**_head("chat.completion"), "choices": choices, "usage": USAGE})


def _deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A message in pieces. The arguments of tool calls come in two."""
    yield {"role": "assistant", "content": None}
    for field in ("reasoning_content", "content"):
        for word in re.findall(r"\S+\s*", message.get(field) or ""):
            yield {field: word}
    for index, call in enumerate(message.get("tool_calls") or ()):
        arguments = call["function"]["arguments"]
        begun = {**call, "index": index, "function": {**call["function"], "arguments": ""}}
        yield {"tool_calls": [begun]}
        for piece in (arguments[:5], arguments[5:]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _head(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": MODEL}


def _chunk(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return event({**_head("chat.completion.chunk"), "choices": [choice]})


def _logprob(word: str) -> dict[str, Any]:
    return {"token": word, "logprob": -0.5, "bytes": list(word.encode()), "top_logprobs": []}


async def _refuse(exchange: Exchange, status: str) -> None:
    code, _, final = status.partition("-")
    headers = [("retry-after", "1")] if code == "429" else []
    if final:
        headers.append(("x-should-retry", "false"))
    await exchange.send({"error": {"message": "not now", "type": "scripted"}}, int(code), headers)


async def _embed(exchange: Exchange) -> None:
    body = exchange.json
    texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
    packed = base64.b64encode(struct.pack(f"<{len(VECTOR)}f", *VECTOR)).decode()
    vector = packed if body.get("encoding_format") == "base64" else list(VECTOR)
    data = [{"object": "embedding", "index": index, "embedding": vector} for index in range(len(texts))]
    usage = {"prompt_tokens": 2, "total_tokens": 2}
    await exchange.send({"object": "list", "data": data, "model": MODEL, "usage": usage})


@contextmanager
def running_fake() -> Iterator[str]:
    """The engine in a thread of its own; yields its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    engine = FakeEngine("fake", Script())
    asyncio.run_coroutine_threadsafe(engine.__aenter__(), loop).result(10)
    try:
        yield engine.url
    finally:
        asyncio.run_coroutine_threadsafe(engine.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
