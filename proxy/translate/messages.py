"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import os

import msgspec

from engine_adapter import JsonBody
from proxy.errors import BadRequest
from proxy.translate.messages_answer import MessageStream, message_of
from proxy.translate.messages_request import chat_of, read_request
from proxy.translate.translation import Predicted

_MARK = b'"cache_control"'


class Messages:
    """`Translation` of `/v1/messages`.

    Attributes:
        id: the answer's.
    """

    counts = False
    source: JsonBody | None = None

    def __init__(self, body: JsonBody) -> None:
        """Raises BadRequest for a request that cannot be served."""
        request = read_request(body)
        if request.max_tokens is None and not self.counts:
            raise BadRequest("max_tokens is missing", param="max_tokens")
        self.chat = chat_of(request, body)
        self.id = f"msg_{os.urandom(12).hex()}"
        self.predicted = Predicted()
        self._model: str | None = body.hint("model")
        self._prewarms, self._marks = request.prewarms, _MARK in body.raw
        self._stream = MessageStream(self.id, self._model, prewarms=self._prewarms, marks=self._marks)

    def answer(self, content: bytes) -> bytes:
        """See Translation."""
        message = message_of(
            content,
            self.id,
            self._model,
            prewarms=self._prewarms,
            marks=self._marks,
            tokens_per_block=self.predicted.tokens_per_block,
        )
        return msgspec.json.encode(message)

    def count(self, tokens: int) -> bytes:
        """See Translation."""
        return msgspec.json.encode({"input_tokens": tokens})

    def event(self, payload: bytes) -> bytes:
        """See Translation."""
        return self._stream.event(payload, self.predicted)

    def end(self) -> bytes:
        """See Translation."""
        return self._stream.end()

    def param(self, of_chat: str) -> str:
        """See Translation. Anthropic's errors name no field."""
        return of_chat


class CountTokens(Messages):
    """`Translation` of `/v1/messages/count_tokens`."""

    counts = True
