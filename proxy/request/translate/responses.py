"""OpenAI's Responses API, `/v1/responses` and `/v1/responses/input_tokens`: its answers, from those of chats.

responses_output.py    chunks → items and their events
responses_request.py   the request: its chat, and what the answer repeats of it
responses_items.py     items → messages
responses_store.py     the responses that are kept
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from math import ceil

import msgspec
from msgspec import UNSET
from typing_extensions import override

from engine_adapter import JsonBody
from proxy.request.stages import Event
from proxy.request.translate.chats import Chat, ChatUsage, Choice, Error, read_chat
from proxy.request.translate.fates import STOPS
from proxy.request.translate.responses_output import Item, ItemEvent, Output
from proxy.request.translate.responses_request import ResponseRequest
from proxy.request.translate.responses_store import ResponseStore
from proxy.request.translate.translation import BROKEN_OFF, Json, named_event

RESPONSES_PATH = "/v1/responses"
INPUT_TOKENS_PATH = "/v1/responses/input_tokens"


class ResponseTranslation(ResponseRequest):
    """`Translation` of one request for a response."""

    def __init__(
        self, body: JsonBody, tenant: str | None, *, store: ResponseStore, counts: bool = False
    ) -> None:
        """Raises BadRequest or NotFound for a request that cannot be served."""
        self._id = f"resp_{secrets.token_hex(24)}"
        super().__init__(body, store.of(tenant), self._id)
        self.counts, self._created_at = counts, int(time.time())
        self._store, self._tenant = store, tenant
        self._output = Output(self.tools, seals=self.seals)
        self._number = 0  # of the next event
        self._timings: dict[str, msgspec.Raw] = {}  # llama-server's, which its own events have, too

    @override
    def count(self, tokens: int) -> bytes:
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})

    @override
    def whole(self, choice: Choice) -> bytes:
        list(self._items_of(choice))  # the items are all that is wanted
        list(self._output.end(self._status))
        return self._final()

    @override
    def first(self) -> Iterable[Event]:
        begun = {"response": self._response("in_progress", [])}
        return self._told((f"response.{kind}", begun) for kind in ("created", "in_progress"))

    @override
    def more(self, chunk: Chat, choice: Choice) -> Iterable[Event]:
        events: list[Event] = []
        if chunk.prompt_progress is not UNSET:
            fields = {"response": self._response("in_progress", []), "prompt_progress": chunk.prompt_progress}
            events += self._told([("response.in_progress", fields)])
        if chunk.timings is not UNSET:
            self._timings = {"timings": chunk.timings}
        events += self._told(self._items_of(choice), self._timings)
        return events

    @override
    def failure(self, event: Event | None) -> Iterable[Event]:
        error = event.read(read_chat).error if event is not None else None
        if not isinstance(error, Error):
            error = Error(error or BROKEN_OFF)
        code = error.code if isinstance(error.code, str) else "server_error"
        told = ("error", {"code": code, "message": error.message, "param": error.param})
        return [*(self._first() if event is not None else ()), *self._told([told])]

    @override
    def last(self) -> Iterable[Event]:
        status = self._status
        yield from self._told(self._output.end(status))
        final = {"response": msgspec.Raw(self._final())}
        yield from self._told([(f"response.{status}", final)], self._timings)

    @property
    def _incomplete(self) -> str | None:
        """Why it is not complete."""
        stop = STOPS.get(self.finish or "")
        return stop.of_response if stop is not None and not self.prewarms else None

    @property
    def _status(self) -> str:
        return "completed" if self._incomplete is None else "incomplete"

    def _items_of(self, choice: Choice) -> Iterable[ItemEvent]:
        logprobs = choice.logprobs.content if choice.logprobs is not None else None
        return self._output.add(self.said(choice), logprobs or [])

    def _told(self, events: Iterable[ItemEvent], beside: Json = {}) -> Iterable[Event]:  # noqa: B006 - read
        """These events, numbered. `beside`: fields of each."""
        for kind, fields in events:
            yield named_event({"type": kind, "sequence_number": self._number, **fields, **beside})
            self._number += 1

    def _final(self) -> bytes:
        """The response, which is kept if the client wants that."""
        items, turn = self._output.items, self.turn
        content = msgspec.json.encode(self._response(self._status, items))
        if turn is not None:
            turn.answered = {item["id"]: msgspec.json.encode(item) for item in items}
            self._store.of(self._tenant).put(self._id, content, turn)
        return content

    def _response(self, status: str, items: list[Item]) -> Json:
        is_over = status != "in_progress"
        reason = self._incomplete if is_over else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": int(time.time()) if is_over else None,
            "status": status,
            "model": self.model,
            "error": None,
            "incomplete_details": None if reason is None else {"reason": reason},
            **self.repeated,
            "output": items,
            "usage": self._counted(self.usage or ChatUsage()) if is_over else None,
        }

    def _counted(self, usage: ChatUsage) -> Json:
        """The usage of an engine that keeps full blocks. Where it counts no reasoning, the share of reasoning
        in the text is that of the tokens."""
        written, is_long = usage.written(self.predicted.tokens_per_block), self.ttl == "12h"
        generated = 0 if self.prewarms else usage.completion_tokens or 0
        reasoning = min(usage.reasoning or ceil(self._output.thoughts * generated), generated)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached,
                "cache_write_tokens": written,
                "cache_write_tokens_details": {
                    "ttl_30m_tokens": 0 if is_long else written,
                    "ttl_12h_tokens": written if is_long else 0,
                },
            },
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage.prompt_tokens + generated,
        }
