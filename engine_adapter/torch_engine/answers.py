"""Writes answers in OpenAI's shapes: chats and completions, whole or streamed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.torch_engine.requests import Token

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity
END_OF_STREAM = b"data: [DONE]\n\n"
_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Piece:
    """A part of an answer: text, and the tokens it came from."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

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


class Shape(Protocol):
    """The shape of one kind of answer."""

    id_prefix: str
    whole: str
    chunk: str
    first: Mapping[str, Any] | None

    def body(self, piece: Piece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """The choice's own fields in a whole answer."""

    def delta(self, piece: Piece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """The choice's own fields in a chunk."""

    def logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Log probabilities of `tokens`."""


class ChatShape:
    """`chat.completion`."""

    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    first: Mapping[str, Any] | None = MappingProxyType(
        {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
    )

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def body(self, piece: Piece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """See `Shape.body`."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"message": message, "logprobs": logprobs}

    def delta(self, piece: Piece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """See `Shape.delta`."""
        return {"delta": {"content": piece.text} if piece.text else {}, "logprobs": logprobs}

    def logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """See `Shape.logprobs`."""
        content = [
            self._entry(token.token_id, token.logprob)
            | {"top_logprobs": [self._entry(*best) for best in token.top_logprobs or ()]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text = self._tokenizer.decode([token_id])
        whole = "\ufffd" not in text  # otherwise part of a character: the text does not show its bytes
        return {
            "token": text,
            "logprob": _finite(logprob),
            "bytes": list(text.encode()) if whole else None,
        }


class CompletionShape:
    """`text_completion`. `answered` are the answer's tokens before it."""

    id_prefix = "cmpl-"
    whole = "text_completion"
    chunk = "text_completion"
    first: Mapping[str, Any] | None = None

    def __init__(self, tokenizer: ChatTokenizer, answered: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._answered = answered
        self._offset = 0

    def body(self, piece: Piece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """See `Shape.body`."""
        return {"text": piece.text, "logprobs": logprobs}

    def delta(self, piece: Piece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """See `Shape.delta`."""
        return self.body(piece, logprobs)

    def logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """See `Shape.logprobs`. Offsets continue from call to call."""
        texts = [self._tokenizer.decode([token.token_id]) for token in tokens]
        self._offset += sum(len(self._tokenizer.decode([token])) for token in self._answered)
        self._answered, offsets = (), []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {self._tokenizer.decode([i]): _finite(logprob) for i, logprob in token.top_logprobs or ()}
                for token in tokens
            ],
            "text_offset": offsets,
        }


class AnswerWriter:
    """Writes one answer, whole or as server-sent events.

    Args:
        shape: chat or completion.
        model: served name.
        with_logprobs: whether the answer carries logprobs.
        prompt_token_ids: returned with the answer; None when the client did not ask.
        include_usage: whether a stream ends with its usage.
        tells_tokens: whether a comment before each event of a stream holds the ids of its tokens.
        goes_on: whether the answer began before: a stream has no opening then.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        model: str,
        with_logprobs: bool,
        prompt_token_ids: Sequence[int] | None,
        include_usage: bool,
        tells_tokens: bool = False,
        goes_on: bool = False,
    ) -> None:
        self._shape = shape
        self._with_logprobs = with_logprobs
        self._prompt_token_ids = prompt_token_ids
        self._include_usage = include_usage
        self._tells_tokens = tells_tokens
        self._goes_on = goes_on
        self._untold: list[Token] = []  # generated since the last event
        self._head = {
            "id": shape.id_prefix + secrets.token_hex(12),
            "object": shape.chunk,
            "created": int(time.time()),
            "model": model,
        }
        self._plain_ends: tuple[bytes, bytes] | None = None

    def whole(self, piece: Piece, finish_reason: str, usage: Usage) -> bytes:
        """The answer as one JSON object."""
        choice = {
            "index": 0,
            **self._shape.body(piece, self._logprobs(piece)),
            "finish_reason": finish_reason,
        }
        answer = {**self._head, "object": self._shape.whole, "choices": [choice], "usage": usage.as_json()}
        if self._prompt_token_ids is not None:
            choice["token_ids"] = [token.token_id for token in piece.tokens]
            answer["prompt_token_ids"] = self._prompt_token_ids
        return _json(answer)

    def opening(self) -> bytes:
        """The first chunk of a stream: a chat's role, the prompt's token ids; empty when there is neither."""
        if self._goes_on or (self._shape.first is None and self._prompt_token_ids is None):
            return b""
        fields = dict(self._shape.first or self._shape.delta(Piece(), None))
        extra: dict[str, Any] = {}
        if self._prompt_token_ids is not None:
            fields["token_ids"] = []
            extra["prompt_token_ids"] = self._prompt_token_ids
        return self._chunk(fields, None, extra)

    def piece(self, piece: Piece) -> bytes:
        """A chunk; empty for a piece that shows the client nothing."""
        if self._tells_tokens:
            self._untold += piece.tokens
        if self._with_logprobs or self._prompt_token_ids is not None:
            return self._told() + self._full_piece(piece, None) if piece.text or piece.tokens else b""
        if not piece.text:
            return b""
        before, after = self._plain_ends or self._split_plain()
        return self._told() + before + _json(piece.text) + after

    def last(self, piece: Piece, finish_reason: str, usage: Usage) -> bytes:
        """The last chunk, the usage if asked for, and the end mark."""
        end = self._full_piece(piece, finish_reason)
        if self._include_usage:
            end += _event({**self._head, "choices": [], "usage": usage.as_json()})
        return end + END_OF_STREAM

    def _told(self) -> bytes:
        """The comment before an event."""
        if not self._untold:
            return b""
        told, self._untold = self._untold, []
        return f": {' '.join(str(token.token_id) for token in told)}\n".encode()

    def _full_piece(self, piece: Piece, finish_reason: str | None) -> bytes:
        fields = self._shape.delta(piece, self._logprobs(piece))
        if self._prompt_token_ids is not None:
            fields["token_ids"] = [token.token_id for token in piece.tokens]
        return self._chunk(fields, finish_reason, {})

    def _chunk(self, fields: dict[str, Any], finish_reason: str | None, extra: dict[str, Any]) -> bytes:
        choice = {"index": 0, **fields, "finish_reason": finish_reason}
        usage = {"usage": None} if self._include_usage else {}
        return _event({**self._head, "choices": [choice], **usage, **extra})

    def _split_plain(self) -> tuple[bytes, bytes]:
        """The bytes before and after the text of a plain chunk. They are the same for every token."""
        marker = secrets.token_hex(16)
        before, _, after = self._full_piece(Piece(marker), None).partition(_json(marker))
        self._plain_ends = before, after
        return before, after

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        return self._shape.logprobs(piece.tokens) if self._with_logprobs and piece.tokens else None


def error_event(body: dict[str, Any]) -> bytes:
    """An error inside a stream. Clients raise on it; a bare end would look like a whole answer."""
    return _event(body)


def _event(content: object) -> bytes:
    return b"data: " + _json(content) + b"\n\n"


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LOWEST_LOGPROB)
