"""The requests of the comparison, as tables: what is sent, and what happens to the engines' answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from tests.compare.doors import Act

ADMIN = "key-of-the-operator"
KEYS = (
    {"key": "key-one", "tenant": "one"},
    {"key": "key-two", "tenant": "two"},
    {"key": "key-few", "tenant": "few", "requests_per_minute": 2, "concurrent_requests": 1},
    {"key": "key-tokens", "tenant": "tokens", "tokens_per_minute": 60},
    {"key": "key-plain", "tenant": "of-plain", "models": ["plain"]},
    {"key": "key-old", "tenant": "old", "expires": "2026-12-31T00:00:00Z"},
)


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that are sent together, each on a connection of its own.

    Attributes:
        acts: what happens to the engines' answers, in the order of the engines' requests.
        takes: seconds by which kvpin's clocks move before a held answer goes on.
        later: seconds by which they move before the case.
        leaves: bytes of the answer after which the client leaves.
    """

    name: str
    requests: tuple[bytes, ...]
    acts: tuple[Act, ...] = ()
    takes: float = 0.25
    later: float = 0.0
    leaves: int | None = None


def http(
    path: str,
    body: object = None,
    *headers: str,
    method: str = "",
    key: str | None = "key-one",
    case: bool = True,
) -> bytes:
    """A request as bytes. A body that is no text is sent as JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    lines = [f"{method} {path} HTTP/1.1", "host: kvpin"]
    lines += [f"authorization: Bearer {key}"] if key else []
    lines += ["x-case: 1"] if case else []
    if body is not None:
        lines += (
            [] if any(h.startswith("content-type") for h in headers) else ["content-type: application/json"]
        )
        lines += [f"content-length: {len(data)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + data


def admin(path: str, body: object = None, **more: str) -> bytes:
    """A request to the admin API."""
    return http(f"/admin/v1/{path}", body, key=ADMIN, case=False, **more)


CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
SYSTEM = "You are a careful assistant. " * 12


def user(text: str, *before: dict) -> list[dict]:
    return [*before, {"role": "user", "content": text}]


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def chat(text: str = "hello", model: str = "tiny", *, system: str = SYSTEM, **fields: object) -> dict:
    """A chat with a long system prompt of its own, so that its prefix is told apart."""
    messages = user(text, {"role": "system", "content": system})
    return {"model": model, "messages": messages, "max_tokens": 4, **fields}


# --- answers in place of an engine's -----------------------------------------------------------------------


def answer(content: object, status: int = 200, *headers: str, kind: str = "application/json") -> bytes:
    """An engine's answer as bytes."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    lines = [
        f"HTTP/1.1 {status} Said",
        f"content-type: {kind}",
        f"content-length: {len(data)}",
        *headers,
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + data


def events(*contents: object, done: bool = True, end: bool = True) -> bytes:
    """A stream as bytes, a chunk for each event."""
    data = [b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in contents]
    data += [b"data: [DONE]\n\n"] if done else []
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in data)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + chunks + (b"0\r\n\r\n" if end else b"")


def piece(text: str | None = None, finish: str | None = None, **delta: object) -> dict:
    """A chunk of a chat's stream."""
    delta = {"content": text, **delta} if text is not None else delta
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {
        "id": "c-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "tiny",
        "choices": [choice],
    }


USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 2,
    "total_tokens": 42,
    "prompt_tokens_details": {"cached_tokens": 16},
}
_MESSAGE = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
WHOLE = {
    "id": "c-1",
    "object": "chat.completion",
    "created": 1,
    "model": "tiny",
    "choices": [_MESSAGE],
    "usage": USAGE,
}
_CALL = {
    "index": 0,
    "id": "t-1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": "x"}'},
}


def error(message: str = "out of order", **fields: object) -> dict:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": None, **fields}}


ERRORS: dict[str, bytes] = {
    **{f"status {s}": answer(error(code=s), s) for s in (400, 401, 403, 404, 405, 409, 413, 422, 424, 429)},
    **{f"status {s}": answer(error(), s) for s in (500, 501, 502, 503, 504, 529)},
    "429 with retry-after": answer(
        error("slow down"), 429, "retry-after: 7", "x-ratelimit-limit-requests: 9"
    ),
    "500 as text": answer(b"Internal Server Error", 500, kind="text/plain"),
    "500 as page": answer(b"<html><body>oops</body></html>", 500, kind="text/html"),
    "503 empty": answer(b"", 503),
    "400 context length": answer(error("too long", code="context_length_exceeded"), 400),
    "404 of the model": answer(error("The model `tiny` does not exist.", param="model"), 404),
    "404 detail": answer({"detail": "Not Found"}, 404),
    "422 of FastAPI": answer({"detail": [{"loc": ["body", "n"], "msg": "bad", "type": "value_error"}]}, 422),
    "flat error": answer({"object": "error", "message": "no", "type": "BadRequestError", "code": 400}, 400),
    "error in 200": answer(error("broken inside", code=500)),
    "client's error in 200": answer(error("bad grammar", type="invalid_request_error", code=400)),
    "no choices": answer({"id": "c", "choices": [], "usage": USAGE}),
    "empty message": answer(
        {**WHOLE, "choices": [{**_MESSAGE, "message": {"role": "assistant", "content": ""}}]}
    ),
    "null message": answer(
        {**WHOLE, "choices": [{**_MESSAGE, "message": {"role": "assistant", "content": None}}]}
    ),
    "tool call": answer(
        {**WHOLE, "choices": [{**_MESSAGE, "message": {"content": None, "tool_calls": [_CALL]}}]}
    ),
    "no usage": answer({k: v for k, v in WHOLE.items() if k != "usage"}),
    "odd usage": answer({**WHOLE, "usage": {"prompt_tokens": -1, "completion_tokens": 2**70}}),
    "broken JSON": answer(b'{"choices": [{"mess'),
    "JSON list": answer([1, 2]),
    "empty 200": answer(b""),
    "204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "302": answer(b"", 302, "location: http://elsewhere/"),
    "page in 200": answer(b"<html>hello</html>", 200, kind="text/html"),
    "no HTTP": b"SSH-2.0-OpenSSH\r\n\r\n",
    "bad header": b"HTTP/1.1 200 OK\r\ncontent length 3\r\n\r\nabc",
    "headers for browsers": answer(WHOLE, 200, "set-cookie: a=b", "server: fake", "x-kvpin-engine: forged"),
    "other headers": answer(WHOLE, 200, "x-own: 1", "X-Own: 2", "cache-control: no-store"),
    "without length": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"
    + json.dumps(WHOLE).encode(),
    "gzip": answer(b"\x1f\x8b\x08\x00", 200, "content-encoding: gzip"),
    "100 before 200": b"HTTP/1.1 100 Continue\r\n\r\n" + answer(WHOLE),
}
DEATHS = {
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
    "no JSON": events(b"hello"),
    "a whole answer": answer(WHOLE),
    "letters beyond ASCII": events(piece("é😀"), piece("漢字", "stop")),
    "half of an emoji": events(
        b'{"choices":[{"index":0,"delta":{"content":"\\ud83d"}}]}', piece("b", "stop")
    ),
}


def _bodies() -> Iterator[tuple[str, bytes]]:
    """Chats of many shapes."""
    shapes: dict[str, dict[str, object]] = {
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
        "continue": {"continue_final_message": True, "add_generation_prompt": False},
        "template kwargs": {"chat_template_kwargs": {"thinking": True}},
    }
    for model in ("tiny", "sg", "plain"):
        for name, fields in shapes.items():
            yield f"chat {model}: {name}", http(CHAT, chat(f"about {name}", model, **fields))


_BAD: dict[str, bytes] = {
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
    "twice the same field": http(CHAT, b'{"model":"tiny","model":"sg","messages":[{"role":"user","content":"a"}]}'),
    "no UTF-8": http(CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"\xff"}]}'),
    "half of an emoji": http(CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"\\ud83d x"}]}'),
    "deep": http(CHAT, b'{"model":"tiny","messages":' + b"[" * 3000 + b"]" * 3000 + b"}"),
    "many values": http(CHAT, chat(more=[0] * 30_000)),
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
    "GET of a chat": http(CHAT),
    "PUT of a chat": http(CHAT, chat(), method="PUT"),
    "DELETE of a chat": http(CHAT, method="DELETE"),
    "OPTIONS": http(CHAT, method="OPTIONS"),
    "HEAD of models": http("/v1/models", method="HEAD"),
    "unknown route": http("/v1/chat/completion", chat()),
    "another unknown route": http("/nothing"),
    "path with dots": http("/v1/../admin/v1/stats"),
    "bad request line": b"GARBAGE\r\n\r\n",
    "HTTP/1.0": http(CHAT, chat()).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "HTTP/2": http(CHAT, chat()).replace(b"HTTP/1.1", b"HTTP/2.0"),
    "no host": http(CHAT, chat()).replace(b"host: kvpin\r\n", b""),
    "two lengths": http(CHAT, chat(), "content-length: 3"),
    "length and chunked": http(CHAT, chat(), "transfer-encoding: chunked"),
    "bad length": http(CHAT, None, "content-length: x", method="POST"),
    "header with a space": http(CHAT, chat(), "bad header: x"),
    "large head": http(CHAT, chat(), "x-large: " + "x" * 70_000),
    "chunked body": http(CHAT, None, "transfer-encoding: chunked", "content-type: application/json", method="POST")
    + b"%x\r\n%b\r\n0\r\n\r\n" % (len(json.dumps(chat("chunked"))), json.dumps(chat("chunked")).encode()),
    "expect": http(CHAT, chat("expected"), "expect: 100-continue"),
    "origin allowed": http(CHAT, chat("web"), "origin: https://chat.example"),
    "origin foreign": http(CHAT, chat("web"), "origin: https://evil.example"),
    "preflight": http(CHAT, None, "origin: https://chat.example", "access-control-request-method: POST", method="OPTIONS"),
    "timeout header": http(CHAT, chat("t"), "x-request-timeout: 30"),
    "timeout header odd": http(CHAT, chat("t"), "x-request-timeout: soon"),
    "own request id": http(CHAT, chat("t"), "x-request-id: mine-1"),
    "headers that end here": http(CHAT, chat("t"), "te: trailers", "x-kvpin-x: 1", "cookie: a=b", "accept-encoding: br"),
    "priority header": http(CHAT, chat("t"), "x-kvpin-priority: -3"),
    "priority header odd": http(CHAT, chat("t"), "x-kvpin-priority: 99"),
    "session header": http(CHAT, chat("t"), "x-session-id: s-9"),
    "compare with": http(CHAT, chat("t, too"), "x-kvpin-compare-with: mine-1"),
}  # fmt: skip

_TOOL = {
    "name": "look",
    "description": "looks",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
_ROUTES: dict[str, bytes] = {
    "models": http("/v1/models"),
    "model": http("/v1/models/tiny"),
    "model unknown": http("/v1/models/huge"),
    "completions": http(TEXT, {"model": "tiny", "prompt": "Once upon a time " * 10, "max_tokens": 3}),
    "completions stream": http(TEXT, {"model": "tiny", "prompt": "Once upon", "max_tokens": 3, "stream": True}),
    "completions ids": http(TEXT, {"model": "tiny", "prompt": list(range(300, 340)), "max_tokens": 3}),
    "completions list": http(TEXT, {"model": "tiny", "prompt": ["One", "Two"], "max_tokens": 3}),
    "completions list stream": http(TEXT, {"model": "sg", "prompt": ["One", "Two"], "max_tokens": 2, "stream": True}),
    "completions lists of ids": http(TEXT, {"model": "plain", "prompt": [[300, 301], [302]], "max_tokens": 2}),
    "completions n": http(TEXT, {"model": "sg", "prompt": "Some", "n": 2, "max_tokens": 2}),
    "completions echo": http(TEXT, {"model": "tiny", "prompt": "Some", "echo": True, "max_tokens": 2}),
    "completions empty": http(TEXT, {"model": "tiny", "prompt": "", "max_tokens": 2}),
    "completions without": http(TEXT, {"model": "tiny", "max_tokens": 2}),
    "completions odd ids": http(TEXT, {"model": "tiny", "prompt": [-1, 10**9], "max_tokens": 2}),
    "messages": http(MESSAGES, {"model": "tiny", "max_tokens": 4, "messages": user("hi")}),
    "messages stream": http(MESSAGES, {"model": "tiny", "max_tokens": 4, "messages": user("hi"), "stream": True}),
    "messages system": http(MESSAGES, {"model": "plain", "max_tokens": 4, "system": SYSTEM, "messages": user("hi")}),
    "messages tools": http(MESSAGES, {"model": "plain", "max_tokens": 4, "tools": [_TOOL], "messages": user("hi")}),
    "messages blocks": http(MESSAGES, {"model": "plain", "max_tokens": 4, "stream": True, "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}]}),
    "messages tool result": http(MESSAGES, {"model": "plain", "max_tokens": 4, "tools": [_TOOL], "messages": [
        *user("look"), {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "seen"}]}]}),
    "messages without max_tokens": http(MESSAGES, {"model": "plain", "messages": user("hi")}),
    "messages bad": http(MESSAGES, {"model": "plain", "max_tokens": 4, "messages": "hi"}),
    "messages unknown model": http(MESSAGES, {"model": "huge", "max_tokens": 4, "messages": user("hi")}),
    "messages count": http(MESSAGES + "/count_tokens", {"model": "plain", "messages": user("hi")}),
    "responses": http(RESPONSES, {"model": "plain", "input": "hi", "max_output_tokens": 4}),
    "responses stream": http(RESPONSES, {"model": "plain", "input": "hi", "max_output_tokens": 4, "stream": True}),
    "responses items": http(RESPONSES, {"model": "plain", "input": user("hi"), "instructions": "Be short.", "store": False}),
    "responses tools": http(RESPONSES, {"model": "plain", "input": "hi", "tools": [{"type": "function", "name": "look"}, {"type": "web_search"}]}),
    "responses unknown before": http(RESPONSES, {"model": "plain", "input": "hi", "previous_response_id": "resp_none"}),
    "responses bad": http(RESPONSES, {"model": "plain", "input": 3}),
    "responses get": http(RESPONSES + "/resp_none"),
    "responses count": http(RESPONSES + "/input_tokens", {"model": "plain", "input": "hi"}),
    "responses of vLLM": http(RESPONSES, {"model": "tiny", "input": "hi", "max_output_tokens": 4}),
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
    "audio form": http("/v1/audio/transcriptions", b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nplain\r\n--x--\r\n',
                       "content-type: multipart/form-data; boundary=x"),
    "images": http("/v1/images/generations", {"model": "plain", "prompt": "a"}),
    "websocket": http("/v1/realtime?model=plain", None, "upgrade: websocket", "connection: upgrade",
                      "sec-websocket-version: 13", "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="),
    "alias": http(CHAT, chat("by alias", "alias")),
    "adapter": http(CHAT, chat("by adapter", "lora")),
    "solo": http(CHAT, chat("by one engine", "solo")),
    "health": http("/health", key=None, case=False),
    "ready": http("/health/ready", key=None, case=False),
    "version": http("/version", key=None, case=False),
    "root": http("/", key=None, case=False),
}  # fmt: skip

_TURNS = [
    *user("one", {"role": "system", "content": "turns " * 40}),
    said("first"),
    *user("two"),
    said("second"),
    *user("three"),
]
_ADMIN: dict[str, bytes] = {
    "without a key": http("/admin/v1/stats", key=None, case=False),
    "with a client's key": http("/admin/v1/stats", case=False),
    "engines": admin("engines"),
    "keys": admin("keys"),
    "issue": admin("keys", {"tenant": "one"}),
    "route": admin("route", chat("about plain")),
    "route of a text": admin("route", {"path": TEXT, "model": "tiny", "prompt": "Once upon a time " * 10}),
    "route for a tenant": admin("route", {**chat("about plain"), "tenant": "two"}),
    "route bad": admin("route", {"model": "huge", "messages": user("a")}),
    "drain": admin("engines/v0/drain", {}),
    "engines, one drained": admin("engines"),
    "undrain": admin("engines/v0/drain", {"undo": True}),
    "drain unknown": admin("engines/none/drain", {}),
    "remove unknown": admin("engines/none", method="DELETE"),
    "add bad": admin("engines", {"kind": "vllm"}),
    "warm": admin(
        "warm",
        {
            "model": "tiny",
            "messages": user("warm", {"role": "system", "content": "warmed " * 40}),
            "tenant": "one",
        },
    ),
    "pin": admin("pin", {"model": "tiny", "prompt": "Once upon a time " * 10, "tenant": "one"}),
    "pin without a tenant": admin("pin", {"model": "tiny", "prompt": "Once upon a time " * 10}),
    "unpin unknown": admin("unpin", {"pin_id": "none"}),
    "offload": admin("offload", {"model": "tiny", "all": True}),
    "restore": admin("restore", {"model": "tiny", "all": True}),
    "flush one": admin("flush", {"engine": "v1"}),
    "flush a tenant": admin("flush", {"tenant": "two"}),
    "flush all of one": admin("flush", {"engine": "v1", "all": True}),
    "flush without target": admin("flush", {}),
    "operations": admin("operations"),
    "operation unknown": admin("operations/none"),
    "requests": admin("requests?limit=5"),
    "requests bad": admin("requests?limit=x"),
    "request unknown": admin("requests/none"),
    "usage": admin("usage"),
    "prefixes": admin("prefixes?limit=20"),
    "prompt tables": admin("prompt_tables"),
    "unknown": admin("nothing"),
    "wrong method": admin("stats", {}),
    "stats": admin("stats"),
    "metrics without a key": http("/metrics", key=None, case=False),
    "metrics": http("/metrics", key=ADMIN, case=False),
}


def cases() -> list[Case]:
    """All, in their order."""
    names, found = count(1), list[Case]()

    def add(name: str, *requests: bytes, acts: tuple[Act, ...] = (), **more: object) -> None:
        found.append(Case(f"{next(names):03} {name}", requests, acts, **more))

    for name, request in _bodies():
        add(name, request)
    for name, request in _ROUTES.items():
        add(f"route: {name}", request)
    for turn in (2, 4, 6):
        add(f"turn {turn // 2}", http(CHAT, {"model": "tiny", "messages": _TURNS[:turn], "max_tokens": 4}))
        add(
            f"turn {turn // 2}, other tenant",
            http(CHAT, {"model": "tiny", "messages": _TURNS[:turn]}, key="key-two"),
        )
    for name, raw in ERRORS.items():
        add(f"engine: {name}", http(CHAT, chat("bad luck")), acts=(Act(raw),))
        if name.startswith(("status 4", "status 50", "error")):
            add(
                f"engine, stream, twice: {name}",
                http(CHAT, chat("bad luck", stream=True)),
                acts=(Act(raw),) * 2,
            )
    for name, act in DEATHS.items():
        add(f"engine dies {name}", http(CHAT, chat("death")), acts=(act,))
        add(f"engine dies {name}, alone", http(CHAT, chat("death", "solo")), acts=(act,))
    for name, raw in STREAMS.items():
        add(f"stream: {name}", http(CHAT, chat("stream", stream=True)), acts=(Act(raw),))
        add(
            f"stream in bytes: {name}",
            http(CHAT, chat("stream", stream=True)),
            acts=(Act(raw, cut=1 if len(raw) < 400 else 5),),
        )
        add(
            f"stream as messages: {name}",
            http(MESSAGES, chat("s", "plain", stream=True)),
            acts=(Act(raw, cut=17),),
        )
    for stop in (150, 400, 700, 1000, -40, -8):
        add(
            f"stream dies at {stop}",
            http(CHAT, chat("death", stream=True, temperature=0)),
            acts=(Act(stop=stop),),
        )
    for name, request in _BAD.items():
        add(f"bad: {name}", request)
    for number in range(4):
        add(f"quota {number}", http(CHAT, chat("quota", max_tokens=1), key="key-few"))
        add(f"tokens {number}", http(CHAT, chat("quota", "plain", system="a"), key="key-tokens"))
    add("quota, later", http(CHAT, chat("quota", max_tokens=1), key="key-few"), later=61.0)
    add("quota, two at once", *[http(CHAT, chat("x"), key="key-few")] * 2, acts=(Act(hold=0),), later=61.0)
    add(
        "three at once",
        *[http(CHAT, chat(f"at once {n}", system=f"sys {n} " * 30)) for n in range(3)],
        acts=(Act(hold=0),) * 3,
    )
    add("slow engine", http(CHAT, chat("slow")), acts=(Act(hold=0),), takes=2.0)
    add("slow stream", http(CHAT, chat("slow", stream=True)), acts=(Act(hold=400),), takes=2.0)
    add("client leaves", http(CHAT, chat("leave")), acts=(Act(hold=0),), leaves=0)
    add("client leaves a stream", http(CHAT, chat("leave", stream=True)), acts=(Act(hold=500),), leaves=100)
    for name, request in _ADMIN.items():
        add(f"admin: {name}", request)
    return found
