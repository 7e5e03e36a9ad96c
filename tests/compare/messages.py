"""Requests of clients and answers of engines as bytes, and cases made of them."""

from __future__ import annotations

import json
from dataclasses import dataclass

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
    lines = [
        f"HTTP/1.1 {status} Said",
        f"content-type: {kind}",
        f"content-length: {len(data)}",
        *more,
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + data


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
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {
        "id": "c-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "tiny",
        "choices": [choice],
    }


def whole(**message: object) -> dict:
    """An answer to a chat."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
    head = {"id": "c-1", "object": "chat.completion", "created": 1, "model": "tiny"}
    return {**head, "choices": [choice], "usage": USAGE}


def error(message: str = "out of order", **fields: object) -> dict:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": "server_error", "param": None, "code": None, **fields}}
