"""The requests of the comparison, as tables: what is sent, and what happens to the engines' answers."""

# ruff: noqa: E501 - a request a line
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.compare.doors import Act

ADMIN = "key-of-the-operator"
CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
SYSTEM = "You are a careful assistant. " * 12
USAGE = {"prompt_tokens": 40, "completion_tokens": 2, "total_tokens": 42}
USAGE |= {"prompt_tokens_details": {"cached_tokens": 16}}


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that are sent together, in their order, each on a connection of its own.

    Attributes:
        acts: what happens to the engines' answers, in the order of the engines' requests.
        takes: seconds by which kvpin's clocks move before a held answer goes on.
        later: seconds by which they move before the case.
        leaves: bytes of the answer after which the client leaves.
        stuck: held answers never go on.
    """

    name: str
    requests: tuple[bytes, ...]
    acts: tuple[Act, ...] = ()
    takes: float = 0.25
    later: float = 0.0
    leaves: int | None = None
    stuck: bool = False


def http(path: str, body: object = None, *more: str, method: str = "", key: str | None = "key-one") -> bytes:
    """A request as bytes. A body that is not bytes is sent as JSON; `more` are further headers."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1", "host: localhost"]
    lines += [f"authorization: Bearer {key}"] if key else []
    lines += ["x-case: 1"] if path.startswith(("/v1", "/tok", "/gen", "/inf")) else []
    if body is not None:
        named = any(header.startswith("content-type") for header in more)
        lines += [f"content-length: {len(data)}", *([] if named else ["content-type: application/json"])]
    return "\r\n".join([*lines, *more, "", ""]).encode() + data


def admin(path: str, body: object = None, **more: str) -> bytes:
    """A request to the admin API."""
    return http(f"/admin/v1/{path}", body, key=ADMIN, **more)


def user(text: str, *before: dict) -> list[dict]:
    """A chat that ends with a message of the user."""
    return [*before, {"role": "user", "content": text}]


def chat(text: str = "hello", model: str = "tiny", *, system: str = SYSTEM, **fields: object) -> dict:
    """A chat, by default with a long system prompt, so that its beginning is reused."""
    messages = user(text, {"role": "system", "content": system})
    return {"model": model, "messages": messages, "max_tokens": 4, **fields}


def answer(content: object, status: int = 200, *more: str, kind: str = "application/json") -> bytes:
    """An engine's answer as bytes."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    head = f"HTTP/1.1 {status} Said", f"content-type: {kind}", f"content-length: {len(data)}"
    return "\r\n".join([*head, *more, "", ""]).encode() + data


def events(*contents: object, done: bool = True) -> bytes:
    """A stream as bytes, with a chunk for each event."""
    data = [b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in contents]
    data += [b"data: [DONE]\n\n"] if done else []
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in data)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + chunks + b"0\r\n\r\n"


def piece(text: str | None = None, finish: str | None = None, **delta: object) -> dict:
    """A chunk of a chat's stream."""
    delta = {"content": text, **delta} if text is not None else delta
    head = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def whole(**message: object) -> dict:
    """An answer to a chat."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
    head = {"id": "c-1", "object": "chat.completion", "created": 1, "model": "tiny"}
    return {**head, "choices": [choice], "usage": USAGE}


def error(message: str = "out of order", **fields: object) -> dict:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": "server_error", "param": None, "code": None, **fields}}


# fmt: off
SHAPES: dict[str, dict[str, object]] = {  # fields of chats
    "plain": {},
    "stream": {"stream": True},
    "stream with usage": {"stream": True, "stream_options": {"include_usage": True}},
    "stream without usage": {"stream": True, "stream_options": {"include_usage": False}},
    "temperature": {"temperature": 0, "seed": 3},
    "max_completion_tokens": {"max_completion_tokens": 3},
    "n": {"n": 2},
    "n, stream": {"n": 3, "stream": True},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "stop": {"stop": ["a", "b"]},
    "unknown field": {"frobnicate": {"a": [1, None, 2.50, "\u00e9"]}},
    "user": {"user": "u-1", "metadata": {"a": "b"}},
    "tools": {"tools": [{"type": "function", "function": {"name": "b", "parameters": {"z": 1, "a": 2}}}]},
    "salt": {"cache_salt": "pepper"},
    "session": {"session_id": "s-1"},
    "prompt_cache_key": {"prompt_cache_key": "k-1"},
    "retention": {"prompt_cache_retention": "24h"},
    "ttl": {"prompt_cache_options": {"ttl": "30m"}},
    "priority": {"priority": 3},
    "return_token_ids": {"return_token_ids": True},
    "return_token_ids, stream": {"return_token_ids": True, "stream": True},
    "continue": {"continue_final_message": True, "add_generation_prompt": False},
    "template kwargs": {"chat_template_kwargs": {"thinking": True}},
}
_CALL = {"index": 0, "id": "t-1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
ANSWERS: dict[str, bytes] = {  # of engines, in place of their own
    **{f"status {s}": answer(error(code=s), s) for s in (400, 401, 403, 404, 405, 409, 413, 422, 424, 429)},
    **{f"status {s}": answer(error(), s) for s in (500, 501, 502, 503, 504, 529)},
    "429 with retry-after": answer(error("slow"), 429, "retry-after: 7", "x-ratelimit-limit-requests: 9"),
    "500, no retry": answer(error("slow"), 500, "x-should-retry: false"),
    "500 as text": answer(b"Internal Server Error", 500, kind="text/plain"),
    "500 as page": answer(b"<html><body>oops</body></html>", 500, kind="text/html"),
    "503 empty": answer(b"", 503),
    "400 context length": answer(error("too long", code="context_length_exceeded"), 400),
    "404 of the model": answer(error("The model `tiny` does not exist.", param="model"), 404),
    "404 detail": answer({"detail": "Not Found"}, 404),
    "422 of FastAPI": answer({"detail": [{"loc": ["body", "n"], "msg": "bad", "type": "value_error"}]}, 422),
    "flat error": answer({"object": "error", "message": "no", "type": "BadRequestError", "code": 400}, 400),
    "error in 200": answer(error("broken inside", code=500)),
    "overloaded in 200": answer({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}),
    "client's error in 200": answer(error("bad grammar", type="invalid_request_error", code=400)),
    "no choices": answer({"id": "c", "choices": [], "usage": USAGE}),
    "empty message": answer(whole(content="")),
    "null message": answer(whole(content=None)),
    "tool call": answer(whole(content=None, tool_calls=[_CALL])),
    "reasoning": answer(whole(content="a", reasoning_content="hm")),
    "no usage": answer({name: value for name, value in whole(content="a").items() if name != "usage"}),
    "odd usage": answer({**whole(content="a"), "usage": {"prompt_tokens": -1, "completion_tokens": 2**70}}),
    "broken JSON": answer(b'{"choices": [{"mess'),
    "JSON list": answer([1, 2]),
    "empty 200": answer(b""),
    "204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "302": answer(b"", 302, "location: http://elsewhere/"),
    "page in 200": answer(b"<html>hello</html>", 200, kind="text/html"),
    "no HTTP": b"SSH-2.0-OpenSSH\r\n\r\n",
    "bad header": b"HTTP/1.1 200 OK\r\ncontent length 3\r\n\r\nabc",
    "headers for browsers": answer(whole(content="a"), 200, "set-cookie: a=b", "server: x", "x-kvpin-engine: y"),
    "other headers": answer(whole(content="a"), 200, "x-own: 1", "X-Own: 2", "cache-control: no-store"),
    "without length": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"
                      + json.dumps(whole(content="a")).encode(),
    "gzip": answer(b"\x1f\x8b\x08\x00", 200, "content-encoding: gzip"),
    "100 before 200": b"HTTP/1.1 100 Continue\r\n\r\n" + answer(whole(content="a")),
}
DEATHS: dict[str, Act] = {
    "before the head": Act(stop=0),
    "before the head, reset": Act(stop=0, reset=True),
    "in the head": Act(stop=20),
    "after the head": Act(stop=160),
    "before the end": Act(stop=-5),
    "before the end, reset": Act(stop=-5, reset=True),
}
STREAMS: dict[str, bytes] = {
    "no role": events(piece("a"), piece("b", "stop")),
    "without [DONE]": events(piece("a"), piece("b", "stop"), done=False),
    "without an end": events(piece("a"), piece("b"), done=False),
    "without any chunk": events(done=False),
    "only [DONE]": events(),
    "usage at the end": events(piece("a"), piece("", "stop"), {**piece(), "choices": [], "usage": USAGE}),
    "usage in each": events({**piece("a"), "usage": USAGE}, {**piece("b", "stop"), "usage": USAGE}),
    "tool call": events(piece(role="assistant"), piece(tool_calls=[_CALL]), piece(finish="tool_calls")),
    "reasoning": events(piece(reasoning_content="hm"), piece("a"), piece(finish="stop")),
    "error first": events(error("broken inside", code=500)),
    "error later": events(piece("a"), error("broken inside", code=500)),
    "broken event": events(piece("a"), b'{"choices": [', piece("b", "stop")),
    "comments": events(piece("a"), piece("b", "stop")).replace(b"data: [DONE]", b": no comment"),
    "CRLF": events(*(json.dumps(each).encode() + b"\r" for each in (piece("a"), piece("b", "stop")))),
    "no JSON": events(b"hello"),
    "a whole answer": answer(whole(content="a")),
    "letters beyond ASCII": events(piece("é😀"), piece("漢字", "stop")),
    "half of an emoji": events(b'{"choices":[{"index":0,"delta":{"content":"\\ud83d"}}]}', piece("b", "stop")),
}
_CHUNKED = json.dumps(chat("chunked")).encode()
BAD: dict[str, bytes] = {  # requests that are bad, or odd
    "no JSON": http(CHAT, b"{"),
    "a list": http(CHAT, []),
    "empty": http(CHAT, b""),
    "messages as text": http(CHAT, {"model": "tiny", "messages": "hello"}),
    "messages empty": http(CHAT, {"model": "tiny", "messages": []}),
    "message without role": http(CHAT, {"model": "tiny", "messages": [{"content": "a"}]}),
    "message as number": http(CHAT, {"model": "tiny", "messages": [3]}),
    "model as number": http(CHAT, {"model": 3, "messages": user("a")}),
    "no model": http(CHAT, {"messages": user("a")}),
    "unknown model": http(CHAT, {"model": "huge", "messages": user("a")}),
    "stream as text": http(CHAT, chat(stream="yes")),
    "n as text": http(CHAT, chat(n="two")),
    "n zero": http(CHAT, chat(n=0)),
    "n many": http(CHAT, chat(n=1000)),
    "max_tokens negative": http(CHAT, chat(max_tokens=-1)),
    "salt empty": http(CHAT, chat(cache_salt="")),
    "salt as number": http(CHAT, chat(cache_salt=3)),
    "session as number": http(CHAT, chat(session_id=3)),
    "ttl odd": http(CHAT, chat(prompt_cache_options={"ttl": "soon"})),
    "field between servers": http(CHAT, chat(kv_transfer_params={"do_remote_prefill": True})),
    "twice the same field": http(CHAT, b'{"model":"tiny","model":"sg","messages":[{"role":"user","content":"a"}]}'),
    "no UTF-8": http(CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"\xff"}]}'),
    "half of an emoji": http(CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"\\ud83d x"}]}'),
    "deep": http(CHAT, b'{"model":"tiny","messages":' + b"[" * 3000 + b"]" * 3000 + b"}"),
    "many values": http(CHAT, chat(more=[0] * 30_000)),
    "many messages": http(CHAT, {"model": "tiny", "messages": user("a") * 17_000}),
    "too large": http(CHAT, chat("x" * (1 << 20))),
    "too large, by its length": http(CHAT, None, "content-length: 99999999", method="POST"),
    "too long a prompt": http(CHAT, chat("word " * 3000)),
    "gzip": http(CHAT, b"\x1f\x8b", "content-encoding: gzip"),
    "no content-type": http(CHAT, chat("a")).replace(b"content-type: application/json\r\n", b""),
    "content-type text": http(CHAT, chat("a"), "content-type: text/plain"),
    "no key": http(CHAT, chat(), key=None),
    "wrong key": http(CHAT, chat(), key="nobody"),
    "old key": http(CHAT, chat(), key="key-old"),
    "key as x-api-key": http(CHAT, chat(), "x-api-key: key-two", key=None),
    "key for another model": http(CHAT, chat(), key="key-plain"),
    "models of a key": http("/v1/models", key="key-plain"),
    "GET of a chat": http(CHAT),
    "PUT of a chat": http(CHAT, chat(), method="PUT"),
    "DELETE of a chat": http(CHAT, method="DELETE"),
    "GET of messages": http(MESSAGES),
    "OPTIONS": http(CHAT, method="OPTIONS"),
    "HEAD of models": http("/v1/models", method="HEAD"),
    "unknown route": http("/v1/chat/completion", chat()),
    "another unknown route": http("/nothing"),
    "path with dots": http("/v1/../admin/v1/stats"),
    "path spelt otherwise": http("//v1//chat%2Fcompletions/", chat("spelt")),
    "bad request line": b"GARBAGE\r\n\r\n",
    "HTTP/1.0": http(CHAT, chat()).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "HTTP/2": http(CHAT, chat()).replace(b"HTTP/1.1", b"HTTP/2.0"),
    "no host": http(CHAT, chat()).replace(b"host: localhost\r\n", b""),
    "two lengths": http(CHAT, chat(), "content-length: 3"),
    "length and chunked": http(CHAT, chat(), "transfer-encoding: chunked"),
    "bad length": http(CHAT, None, "content-length: x", method="POST"),
    "header with a space": http(CHAT, chat(), "bad header: x"),
    "large head": http(CHAT, chat(), "x-large: " + "x" * 70_000),
    "chunked body": http(CHAT, None, "transfer-encoding: chunked", "content-type: application/json", method="POST")
                    + b"%x\r\n%b\r\n0\r\n\r\n" % (len(_CHUNKED), _CHUNKED),
    "expect": http(CHAT, chat("expected"), "expect: 100-continue"),
    "origin allowed": http(CHAT, chat("web"), "origin: https://chat.example"),
    "origin foreign": http(CHAT, chat("web"), "origin: https://evil.example"),
    "preflight": http(CHAT, None, "origin: https://chat.example", "access-control-request-method: POST",
                      method="OPTIONS"),
    "time-out header": http(CHAT, chat("t"), "x-request-timeout: 30"),
    "time-out header odd": http(CHAT, chat("t"), "x-request-timeout: soon"),
    "own request id": http(CHAT, chat("t"), "x-request-id: mine-1"),
    "own request id odd": http(CHAT, chat("t"), "x-request-id: " + "x" * 200),
    "headers that end here": http(CHAT, chat("t"), "te: trailers", "x-kvpin-x: 1", "cookie: a=b",
                                  "accept-encoding: br"),
    "headers that go on": http(CHAT, chat("t"), "User-Agent: me", "x-own: 1", "openai-organization: o"),
    "priority header": http(CHAT, chat("t"), "x-kvpin-priority: -3"),
    "priority header odd": http(CHAT, chat("t"), "x-kvpin-priority: 99"),
    "session header": http(CHAT, chat("t"), "x-session-id: s-9"),
    "compare with": http(CHAT, chat("t, too"), "x-kvpin-compare-with: mine-1"),
}
_TOOL = {"name": "look", "description": "looks", "input_schema": {"type": "object", "properties": {"at": {}}}}
_USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]}
_RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "seen"}]}
_MARKED = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
_FORM = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nplain\r\n--x--\r\n'
_AGENT = "x-anthropic-billing-header: cc_version=1.2; cch=1;\nToday is 2027-01-15T10:00:00Z. " + SYSTEM


def _message(model: str = "plain", **fields: object) -> bytes:
    return http(MESSAGES, {"model": model, "max_tokens": 4, "messages": user("hi"), **fields})


def _response(model: str = "plain", **fields: object) -> bytes:
    return http(RESPONSES, {"model": model, "input": "hi", "max_output_tokens": 4, **fields})


def _text(model: str, prompt: object, **fields: object) -> bytes:
    return http(TEXT, {"model": model, "prompt": prompt, "max_tokens": 3, **fields})


ROUTES: dict[str, bytes] = {
    "models": http("/v1/models"),
    "model": http("/v1/models/tiny"),
    "model unknown": http("/v1/models/huge"),
    "completions": _text("tiny", "Once upon a time " * 10),
    "completions stream": _text("tiny", "Once upon", stream=True),
    "completions ids": _text("tiny", [*range(300, 340)]),
    "completions of whole blocks": _text("tiny", [*range(300, 332)]),
    "completions of whole blocks again": _text("tiny", [*range(300, 332)]),
    "completions list": _text("tiny", ["One", "Two"]),
    "completions list stream": _text("sg", ["One", "Two"], stream=True),
    "completions lists of ids": _text("solo", [[300, 301], [302]]),
    "completions n": _text("sg", "Some", n=2),
    "completions echo": _text("tiny", "Some", echo=True),
    "completions empty": _text("tiny", ""),
    "completions without": http(TEXT, {"model": "tiny", "max_tokens": 2}),
    "completions odd ids": _text("tiny", [-1, 10**9]),
    "messages": _message("tiny"),
    "messages stream": _message("tiny", stream=True),
    "messages system": _message(system=SYSTEM),
    "messages tools": _message(tools=[_TOOL]),
    "messages blocks": _message(messages=[{"role": "user", "content": _MARKED}], stream=True),
    "messages tool result": _message(tools=[_TOOL], messages=[*user("look"), _USE, _RESULT]),
    "messages of an agent": _message(system=_AGENT, tools=[_TOOL, {**_TOOL, "name": "act"}]),
    "messages without max_tokens": http(MESSAGES, {"model": "plain", "messages": user("hi")}),
    "messages bad": _message(messages="hi"),
    "messages unknown model": _message("huge"),
    "messages count": http(MESSAGES + "/count_tokens", {"model": "plain", "messages": user("hi")}),
    "responses": _response(),
    "responses stream": _response(stream=True),
    "responses items": _response(input=user("hi"), instructions="Be short.", store=False),
    "responses tools": _response(tools=[{"type": "function", "name": "look"}, {"type": "web_search"}]),
    "responses unknown before": _response(previous_response_id="resp_none"),
    "responses bad": _response(input=3),
    "responses get": http(RESPONSES + "/resp_none"),
    "responses count": http(RESPONSES + "/input_tokens", {"model": "plain", "input": "hi"}),
    "responses of vLLM": _response("tiny"),
    "responses as chats": _response("sg"),
    "responses as chats, stream": _response("sg", stream=True),
    "responses as chats, tools": _response("sg", tools=[{"type": "function", "name": "look"}], input=user("hi")),
    "embeddings": http(EMBEDDINGS, {"model": "plain", "input": "hi"}),
    "embeddings list": http(EMBEDDINGS, {"model": "plain", "input": ["hi", "ho"]}),
    "embeddings of vLLM": http(EMBEDDINGS, {"model": "tiny", "input": "hi"}),
    "tokenize": http("/tokenize", {"model": "tiny", "prompt": "hello"}),
    "tokenize of SGLang": http("/tokenize", {"model": "sg", "prompt": "hello"}),
    "generate": http("/generate", {"model": "sg", "text": "hello", "sampling_params": {"max_new_tokens": 2}}),
    "infill": http("/infill", {"model": "tiny", "input_prefix": "a", "input_suffix": "b"}),
    "rerank": http("/v1/rerank", {"model": "tiny", "query": "a", "documents": ["b"]}),
    "files": http("/v1/files"),
    "file": http("/v1/files/file-1"),
    "batches": http("/v1/batches"),
    "moderations": http("/v1/moderations", {"model": "tiny", "input": "a"}),
    "audio form": http("/v1/audio/transcriptions", _FORM, "content-type: multipart/form-data; boundary=x"),
    "images": http("/v1/images/generations", {"model": "plain", "prompt": "a"}),
    "websocket": http("/v1/realtime?model=plain", None, "upgrade: websocket", "connection: upgrade",
                      "sec-websocket-version: 13", "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="),
    "alias": http(CHAT, chat("by alias", "alias")),
    "adapter": http(CHAT, chat("by adapter", "lora")),
    "solo": http(CHAT, chat("by one engine", "solo")),
    "agent": http(CHAT, chat("by an agent", "plain", system=_AGENT)),
    "health": http("/health", key=None),
    "ready": http("/health/ready", key=None),
    "version": http("/version", key=None),
    "root": http("/", key=None),
}
_SAID = {"role": "assistant", "content": "said"}
_TURNS = [*user("one", {"role": "system", "content": "turns " * 40}), _SAID, *user("two"), _SAID, *user("three")]
_WARM = user("warm", {"role": "system", "content": "warmed " * 40})
STORED: dict[str, tuple[bytes, bytes]] = {  # routes of what engines keep, and their answers
    "file": (http("/v1/files", _FORM, "content-type: multipart/form-data; boundary=x"),
             answer({"id": "file-1", "object": "file"})),
    "file again": (http("/v1/files/file-1"), answer({"id": "file-1", "object": "file"})),
    "list of files": (http("/v1/files"), answer({"object": "list", "data": [{"id": "file-1"}]})),
    "batch": (http("/v1/batches", {"input_file_id": "file-1", "endpoint": CHAT}), answer({"id": "batch_1"})),
    "batch again": (http("/v1/batches/batch_1"), answer({"id": "batch_1"})),
    "embeddings": (http(EMBEDDINGS, {"model": "tiny", "input": "hi"}),
                   answer({"object": "list", "data": [{"embedding": [0.5, 1e-7]}], "usage": USAGE})),
    "speech": (http("/v1/audio/speech", {"model": "tiny", "input": "hi"}), answer(b"\0\1", kind="audio/wav")),
    "a file that none has": (http("/v1/files/file-2"), answer(error("No such file"), 404)),
    "websocket": (ROUTES["websocket"].replace(b"plain", b"tiny"),
                  (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
                   b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n\x81\x02hi\x88\x00")),
}
ORDERS: dict[str, bytes] = {  # the admin API
    "without a key": http("/admin/v1/stats", key=None),
    "with a client's key": http("/admin/v1/stats"),
    "engines": admin("engines"),
    "keys": admin("keys"),
    "issue": admin("keys", {"tenant": "one"}),
    "route": admin("route", chat("about plain")),
    "route of a text": admin("route", {"path": TEXT, "model": "tiny", "prompt": "Once upon a time " * 10}),
    "route for a tenant": admin("route", {**chat("about plain"), "tenant": "two"}),
    "route bad": admin("route", {"model": "huge", "messages": user("a")}),
    "drain": admin("engines/v0/drain", {}),
    "engines, one drained": admin("engines"),
    "chat, one drained": http(CHAT, chat("drained")),
    "drain, undone": admin("engines/v0/drain", {"undo": True}),
    "drain unknown": admin("engines/none/drain", {}),
    "remove unknown": admin("engines/none", method="DELETE"),
    "add bad": admin("engines", {"kind": "vllm"}),
    "warm": admin("warm", {"model": "tiny", "messages": _WARM, "tenant": "one"}),
    "warmed": http(CHAT, {"model": "tiny", "messages": _WARM, "max_tokens": 2}),
    "pin": admin("pin", {"model": "tiny", "prompt": "Once upon a time " * 10, "tenant": "one"}),
    "pin without a tenant": admin("pin", {"model": "tiny", "prompt": "Once upon a time " * 10}),
    "unpin unknown": admin("unpin", {"pin_id": "none"}),
    "offload": admin("offload", {"model": "tiny", "all": True}),
    "restore": admin("restore", {"model": "tiny", "all": True}),
    "flush one": admin("flush", {"engine": "v1"}),
    "flushed": http(CHAT, chat("flushed")),
    "flush a tenant": admin("flush", {"tenant": "two"}),
    "flush too much": admin("flush", {"engine": "v1", "all": True}),
    "flush without target": admin("flush", {}),
    "operations": admin("operations"),
    "operation unknown": admin("operations/none"),
    "requests": admin("requests?limit=5"),
    "requests bad": admin("requests?limit=x"),
    "request unknown": admin("requests/none"),
    "usage": admin("usage"),
    "usage of a day": admin("usage?days=1"),
    "prefixes": admin("prefixes?limit=20"),
    "prompt tables": admin("prompt_tables"),
    "unknown": admin("nothing"),
    "wrong method": admin("stats", {}),
    "stats": admin("stats"),
    "metrics without a key": http("/metrics", key=None),
    "metrics": http("/metrics", key=ADMIN),
}
# fmt: on


def _each(kind: str, requests: dict[str, bytes], only: tuple[str, ...] = ()) -> Iterator[Case]:
    return (Case(f"{kind}: {name}", (requests[name],)) for name in only or requests)


def _chats(models: tuple[str, ...]) -> Iterator[Case]:
    for model in models:
        for name, fields in SHAPES.items():
            yield Case(f"chat {model}: {name}", (http(CHAT, chat(f"about {name}", model, **fields)),))


def _troubles() -> Iterator[Case]:
    """Engines that err, die or are slow."""
    for name, raw in ANSWERS.items():
        yield Case(f"engine: {name}", (http(CHAT, chat("bad luck")),), (Act(raw),))
        if name.startswith(("status 4", "status 50", "error", "no HTTP", "broken")):
            yield Case(f"twice: {name}", (http(CHAT, chat("bad luck", stream=True)),), (Act(raw),) * 2)
    for name, act in DEATHS.items():
        yield Case(f"engine dies {name}", (http(CHAT, chat("death")),), (act,))
        yield Case(f"engine dies {name}, alone", (http(CHAT, chat("death", "solo")),), (act,))
    for name, raw in STREAMS.items():
        cut = 1 if len(raw) < 400 else 5
        yield Case(f"stream: {name}", (http(CHAT, chat("stream", stream=True)),), (Act(raw),))
        yield Case(f"stream in bytes: {name}", (http(CHAT, chat("stream", stream=True)),), (Act(raw, cut),))
        yield Case(f"messages: {name}", (http(MESSAGES, chat("s", "plain", stream=True)),), (Act(raw, 17),))
    for name in ("no role", "tool call", "reasoning", "without an end"):
        yield Case(f"responses: {name}", (_response("sg", stream=True),), (Act(STREAMS[name], 13),))
    dying = http(CHAT, chat("death", stream=True, temperature=0, stream_options={"include_usage": True}))
    for stop in (150, 400, 700, 1000, -40, -8):
        yield Case(f"stream dies at {stop}", (dying,), (Act(stop=stop),))
    yield Case("stream dies, other answer", (dying,), (Act(stop=700), Act(STREAMS["no role"])))
    yield Case("stream dies twice", (dying,), (Act(stop=500), Act(stop=700)))
    yield Case("stream dies, n", (http(CHAT, chat("death", n=2, stream=True)),), (Act(stop=500),))
    yield Case("slow engine", (http(CHAT, chat("slow")),), (Act(hold=0),), takes=2.0)
    yield Case("slow stream", (http(CHAT, chat("slow", stream=True)),), (Act(hold=400),), takes=0.5)
    yield Case("late engine", (http(CHAT, chat("late")),), (Act(hold=0),), takes=4.0, stuck=True)
    alone = http(CHAT, chat("late", "solo"))
    yield Case("late engine, alone", (alone,), (Act(hold=0),), takes=4.0, stuck=True)
    yield Case("too long in all", (http(CHAT, chat("late")),), (Act(hold=0),), takes=90.0, stuck=True)
    yield Case("client leaves", (http(CHAT, chat("leave")),), (Act(hold=0),), leaves=0)
    stream = http(CHAT, chat("leave", stream=True))
    yield Case("client leaves a stream", (stream,), (Act(hold=500),), leaves=100)


def _crowds() -> Iterator[Case]:
    """Quotas, and requests at once."""
    for number in range(4):
        yield Case(f"quota {number}", (http(CHAT, chat("quota", max_tokens=1), key="key-few"),))
        yield Case(f"tokens {number}", (http(CHAT, chat("q", "plain", system="a"), key="key-tokens"),))
    few = http(CHAT, chat("quota", max_tokens=1), key="key-few")
    yield Case("quota, later", (few,), later=61.0)
    yield Case("quota, two at once", (few, few), (Act(hold=0),), later=61.0)
    three = tuple(http(CHAT, chat(f"at once {n}", system=f"sys {n} " * 30)) for n in range(3))
    yield Case("three at once", three, (Act(hold=0),) * 3)
    same = (http(CHAT, chat("at once", system="the same " * 60)),) * 2
    yield Case("two of one prefix at once", same, (Act(hold=0),) * 2)
    long = (chat("queue", "solo", system=f"long {n} " * 300) for n in range(9))
    queue = tuple(http(CHAT, body, f"x-kvpin-priority: {-n % 3}") for n, body in enumerate(long))
    yield Case("queue", queue, (Act(hold=0),) * 9)


def _with_keys() -> Iterator[Case]:
    yield from _chats(("tiny", "sg", "plain"))
    yield from _each("route", ROUTES)
    for turn in (2, 4, 6):
        for key in ("key-one", "key-two"):
            body = {"model": "tiny", "messages": _TURNS[:turn], "max_tokens": 4}
            yield Case(f"turn {turn // 2}, {key}", (http(CHAT, body, key=key),))
    yield from _troubles()
    yield from _each("request", BAD)
    yield from _crowds()
    yield from _each("admin", ORDERS)


def _open() -> Iterator[Case]:
    yield from _chats(("tiny",))
    yield from _each("route", ROUTES)
    yield from (Case(f"stored: {name}", (sent,), (Act(raw),) * 2) for name, (sent, raw) in STORED.items())
    for name in ("status 401", "status 429", "status 500", "broken JSON"):
        yield Case(f"engine: {name}", (http(CHAT, chat("bad luck")),), (Act(ANSWERS[name]),))
    yield Case("engine dies", (http(CHAT, chat("death")),), (DEATHS["before the head"],))
    few = ("no model", "unknown model", "too long a prompt", "salt as number", "session header")
    yield from _each("request", BAD, few)
    yield Case("admin: through a proxy", (http("/admin/v1/stats", None, "x-forwarded-for: 1.2.3.4"),))
    few = ("without a key", "route", "flush one", "requests", "usage", "metrics without a key")
    yield from _each("admin", ORDERS, few)


def cases(world: str) -> list[Case]:
    """The cases of a world, in their order and numbered."""
    found = {"keys": _with_keys, "open": _open}[world]()
    return [replace(case, name=f"{world} {number:03} {case.name}") for number, case in enumerate(found, 1)]
