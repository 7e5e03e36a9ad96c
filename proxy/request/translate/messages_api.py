"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import msgspec

from engine_adapter import JsonBody
from proxy.errors import BadRequest
from proxy.request.translate.messages_answer import MessageAnswer
from proxy.request.translate.messages_request import NAMES, changed_in, chat_of, read_request
from proxy.request.translate.wording import Wording

_MARK = b'"cache_control"'


class MessageTranslation(MessageAnswer):
    """`Translation` of `/v1/messages`, or with `counts` of `/v1/messages/count_tokens`."""

    source: JsonBody | None = None

    def __init__(self, body: JsonBody, *, counts: bool = False) -> None:
        """Raises BadRequest for a request that cannot be served."""
        request = read_request(body)
        if request.max_tokens is None and not counts:
            raise BadRequest("max_tokens is missing", param="max_tokens")
        super().__init__(body.hint("model"), prewarms=request.prewarms, marks=_MARK in body.raw)
        self.counts = counts
        self.chat, places, tools = chat_of(request, body)
        self.changed = changed_in(request, body)
        self.wording = Wording(NAMES, places, tools)

    def count(self, tokens: int) -> bytes:
        """The answer to a request that counts."""
        return msgspec.json.encode({"input_tokens": tokens})
