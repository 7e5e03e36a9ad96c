"""Writes answers in OpenAI's shapes: chats and completions, whole or streamed, of one choice or several."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from engine_adapter.torch_engine.detokenize import TextOffsets, TokenBytes, shown
from engine_adapter.torch_engine.requests import Token
from engine_adapter.torch_engine.tool_calls import CallPart

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity
END_OF_STREAM = b"data: [DONE]\n\n"
_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Piece:
    """A part of one choice.

    Attributes:
        text: new text, and `calls` new parts of tool calls.
        tokens: the tokens they came from.
        echoed: tokens of the prompt, before `tokens`.
        finish_reason: set in the last piece.
    """

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    calls: list[CallPart] = field(default_factory=list)
    echoed: list[Token] = field(default_factory=list)
    finish_reason: str | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.calls or self.echoed or self.finish_reason)

    def add(self, more: Piece) -> None:
        """Appends the piece that follows."""
        self.text += more.text
        self.tokens += more.tokens
        self.calls += more.calls
        self.echoed += more.echoed
        self.finish_reason = more.finish_reason


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts of one request: its prompt once, and the tokens of all choices."""

    prompt: int
    cached: int
    completion: int

    def as_json(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class ChatShape:
    """`chat.completion`."""

    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    first: Mapping[str, Any] | None = MappingProxyType(
        {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
    )

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes

    def body(self, piece: Piece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """The choice's own fields in a whole answer."""
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.calls:
            message["content"] = piece.text or None
            message["tool_calls"] = _whole_calls(piece.calls)
        return {"message": message, "logprobs": logprobs}

    def delta(self, piece: Piece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """The choice's own fields in a chunk."""
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.calls:
            delta["tool_calls"] = [call.as_delta() for call in piece.calls]
        return {"delta": delta, "logprobs": logprobs}

    def logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Log probabilities of `tokens`."""
        content = [
            self._entry(token.token_id, token.logprob)
            | {"top_logprobs": [self._entry(*best) for best in token.top_logprobs or ()]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        content = self._bytes.of(token_id)
        return {"token": shown(content), "logprob": _finite(logprob), "bytes": list(content)}


class CompletionShape:
    """`text_completion`. `answered` are the answer's tokens before it."""

    id_prefix = "cmpl-"
    whole = "text_completion"
    chunk = "text_completion"
    first: Mapping[str, Any] | None = None

    def __init__(self, token_bytes: TokenBytes, answered: Sequence[int] = ()) -> None:
        self._bytes = token_bytes
        self._answered = answered
        self._offsets = TextOffsets()

    def body(self, piece: Piece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """The choice's own fields in a whole answer."""
        return {"text": piece.text, "logprobs": logprobs}

    def delta(self, piece: Piece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """The choice's own fields in a chunk."""
        return self.body(piece, logprobs)

    def logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Log probabilities of `tokens`. Offsets continue from call to call."""
        for token_id in self._answered:
            self._offsets.next(self._bytes.of(token_id))
        self._answered = ()
        contents = [self._bytes.of(token.token_id) for token in tokens]
        return {
            "tokens": [shown(content) for content in contents],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._best(token) for token in tokens],
            "text_offset": [self._offsets.next(content) for content in contents],
        }

    def _best(self, token: Token) -> dict[str, Any] | None:
        """The best tokens and the chosen one; None for the first token of a prompt."""
        if token.logprob is None:
            return None
        best = {shown(self._bytes.of(i)): _finite(logprob) for i, logprob in token.top_logprobs or ()}
        return best | {shown(self._bytes.of(token.token_id)): _finite(token.logprob)}


Shape = ChatShape | CompletionShape
"""The shape of one choice of one kind of answer."""


@dataclass(kw_only=True)
class AnswerWriter:
    """Writes one answer, whole or as server-sent events.

    Attributes:
        prompt_token_ids: returned with the answer; None when the client did not ask.
        tells_tokens: whether a comment before each event of a stream holds the ids of its tokens.
        goes_on: whether the answer began before: a stream has no opening then.
    """

    shapes: Sequence[Shape]
    model: str
    with_logprobs: bool = False
    prompt_token_ids: Sequence[int] | None = None
    include_usage: bool = False
    tells_tokens: bool = False
    goes_on: bool = False
    _untold: list[Token] = field(default_factory=list, init=False)  # generated since the last event
    _plain_ends: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, init=False)
    _head: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self._head = {
            "id": self.shapes[0].id_prefix + secrets.token_hex(12),
            "object": self.shapes[0].chunk,
            "created": int(time.time()),
            "model": self.model,
        }

    def whole(self, choices: Sequence[Piece], usage: TokenUsage) -> bytes:
        """The answer as one JSON object."""
        answer = {
            **self._head,
            "object": self.shapes[0].whole,
            "choices": [
                self._choice(index, self.shapes[index].body(piece, self._logprobs(index, piece)), piece)
                for index, piece in enumerate(choices)
            ],
            "usage": usage.as_json(),
        }
        if self.prompt_token_ids is not None:
            answer["prompt_token_ids"] = self.prompt_token_ids
        return _json(answer)

    def opening(self) -> bytes:
        """The first chunks of a stream: a chat's role, the prompt's token ids; empty if there is neither."""
        if self.goes_on or (self.shapes[0].first is None and self.prompt_token_ids is None):
            return b""
        extra = {} if self.prompt_token_ids is None else {"prompt_token_ids": self.prompt_token_ids}
        return b"".join(
            self._chunk(index, dict(shape.first or shape.delta(Piece(), None)), Piece(), extra)
            for index, shape in enumerate(self.shapes)
        )

    def piece(self, index: int, piece: Piece) -> bytes:
        """A chunk of a choice; empty for a piece that shows the client nothing."""
        if self.tells_tokens and piece.finish_reason is None:
            self._untold += piece.tokens
        if piece.finish_reason is not None:
            return self._full_piece(index, piece)
        if self.with_logprobs or self.prompt_token_ids is not None or piece.calls:
            return self._told() + self._full_piece(index, piece) if piece else b""
        if not piece.text:
            return b""
        before, after = self._plain_ends.get(index) or self._split_plain(index)
        return self._told() + before + _json(piece.text) + after

    def end(self, usage: TokenUsage) -> bytes:
        """The usage if asked for, and the end mark."""
        end = _event({**self._head, "choices": [], "usage": usage.as_json()}) if self.include_usage else b""
        return end + END_OF_STREAM

    def _choice(self, index: int, fields: dict[str, Any], piece: Piece) -> dict[str, Any]:
        choice = {"index": index, **fields, "finish_reason": piece.finish_reason}
        if self.prompt_token_ids is not None:
            choice["token_ids"] = [token.token_id for token in piece.tokens]
        return choice

    def _told(self) -> bytes:
        """The comment before an event."""
        if not self._untold:
            return b""
        told, self._untold = self._untold, []
        return f": {' '.join(str(token.token_id) for token in told)}\n".encode()

    def _full_piece(self, index: int, piece: Piece) -> bytes:
        return self._chunk(index, self.shapes[index].delta(piece, self._logprobs(index, piece)), piece, {})

    def _chunk(self, index: int, fields: dict[str, Any], piece: Piece, extra: Mapping[str, Any]) -> bytes:
        usage = {"usage": None} if self.include_usage else {}
        return _event({**self._head, "choices": [self._choice(index, fields, piece)], **usage, **extra})

    def _split_plain(self, index: int) -> tuple[bytes, bytes]:
        """The bytes before and after the text of a plain chunk. They are the same for every token."""
        marker = secrets.token_hex(16)
        before, _, after = self._full_piece(index, Piece(marker)).partition(_json(marker))
        self._plain_ends[index] = before, after
        return before, after

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any] | None:
        tokens = piece.echoed + piece.tokens
        return self.shapes[index].logprobs(tokens) if self.with_logprobs and tokens else None


def error_event(body: dict[str, Any]) -> bytes:
    """An error inside a stream. Clients raise on it; a bare end would look like a whole answer."""
    return _event(body)


def _whole_calls(parts: Sequence[CallPart]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for part in parts:
        if part.call_id is not None:
            function = {"name": part.name, "arguments": ""}
            calls.append({"id": part.call_id, "type": "function", "function": function})
        calls[part.index]["function"]["arguments"] += part.arguments
    return calls


def _event(content: object) -> bytes:
    return b"data: " + _json(content) + b"\n\n"


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LOWEST_LOGPROB)
