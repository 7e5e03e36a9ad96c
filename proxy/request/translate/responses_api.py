"""OpenAI's Responses API, served as chats.

responses_request.py   the request: its chat, and what the answer repeats of it
responses_items.py     items → messages
responses_answer.py    chunks → items and events
responses_store.py     the responses that are kept
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from engine_adapter import JsonBody
from proxy.errors import EngineFailed
from proxy.request.translate.chats import Chat, ChatMessage, ChatUsage, Error, read_chat
from proxy.request.translate.responses_answer import Event, Output, usage_of
from proxy.request.translate.responses_request import read_request
from proxy.request.translate.responses_store import ResponseStore
from proxy.request.translate.translation import Predicted

RESPONSES_PATH = "/v1/responses"
INPUT_TOKENS_PATH = "/v1/responses/input_tokens"
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_BROKEN_OFF = "the engine broke off its answer"


class ResponseTranslation:
    """`Translation` of one request for a response."""

    def __init__(
        self, body: JsonBody, tenant: str | None, *, store: ResponseStore, counts: bool = False
    ) -> None:
        """Raises BadRequest or NotFound for a request that cannot be served."""
        self._id = f"resp_{secrets.token_hex(24)}"
        self._created_at = int(time.time())
        asked = read_request(body, store.of(tenant), self._id)
        self.chat = asked.chat
        self.counts = counts
        self.source = asked.source
        self.wording = asked.wording
        self.changed = asked.changed
        self.predicted = Predicted()
        self._keep = partial(store.put, tenant, self._id)
        self._turn = asked.turn
        self._repeated = asked.repeated
        self._prewarms = asked.prewarms
        self._ttl = asked.ttl
        self._output = Output(asked.tools, seals=asked.seals)
        self._model = body.get("model")
        self._usage: ChatUsage | None = None
        self._finish: str | None = None
        self._begun = self._failed = self._garbled = False
        self._number = 0  # of the next event
        self._timings: dict[str, msgspec.Raw] = {}  # llama-server's, which its own events have, too

    # --- Translation ----------------------------------------------------------------------------------

    def answer(self, content: bytes) -> bytes:
        """The response, from a whole chat: a stream of one chunk."""
        chunk = read_chat(content)
        if not chunk.choices:
            raise EngineFailed("the engine's answer is not that of a chat")
        list(self._take(chunk))  # the items are all that is wanted
        self._finish = self._finish or "stop"
        list(self._output.end(self._status))
        return self._final(self._status)

    def count(self, tokens: int) -> bytes:
        """The answer to a request that counts."""
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})

    def event(self, payload: bytes) -> bytes:
        """The events that a chunk makes. After what is no chunk, as half an event, comes only an error."""
        try:
            chunk = read_chat(payload)
        except EngineFailed:
            self._garbled = True
            return b""
        if self._failed or (self._garbled and chunk.error is None):
            return b""
        events: list[Event] = []
        if not self._begun:
            self._begun = True
            begun = self._response("in_progress", [])
            events += [(f"response.{kind}", {"response": begun}) for kind in ("created", "in_progress")]
        if chunk.prompt_progress is not UNSET:
            progress = {"prompt_progress": chunk.prompt_progress}
            events.append(
                ("response.in_progress", {"response": self._response("in_progress", []), **progress})
            )
        if chunk.error is not None:
            events.append(self._error(chunk.error))
        if chunk.timings is not UNSET:
            self._timings = {"timings": chunk.timings}
        events += ((kind, {**fields, **self._timings}) for kind, fields in self._take(chunk))
        return self._written(events)

    def end(self) -> bytes:
        """The last events. A stream that does not say why it ended is not complete: its end is an error."""
        if self._failed:
            return b""
        if self._garbled or self._finish is None:
            return self._written([self._error(_BROKEN_OFF)])
        status = self._status
        events = list(self._output.end(status))
        final = msgspec.Raw(self._final(status))
        return self._written([*events, (f"response.{status}", {"response": final, **self._timings})])

    # --- inside ---------------------------------------------------------------------------------------

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish in _INCOMPLETE and not self._prewarms else "completed"

    def _take(self, chunk: Chat) -> Iterable[Event]:
        self._usage = chunk.usage or self._usage
        self._model = self._model or chunk.model
        for choice in chunk.choices[:1]:
            logprobs = choice.logprobs.content if choice.logprobs is not None else None
            self._finish = choice.finish_reason or self._finish
            if self._prewarms:
                continue  # the prompt is computed, and the token that it took is nobody's
            yield from self._output.add(choice.delta or choice.message or ChatMessage(), logprobs or [])

    def _error(self, error: Error | str) -> Event:
        self._failed = True
        message, code, param = (
            (error, None, None) if isinstance(error, str) else (error.message, error.code, error.param)
        )
        code = code if isinstance(code, str) else "server_error"
        return "error", {"code": code, "message": message, "param": param}

    def _written(self, events: Iterable[Event]) -> bytes:
        written = []
        for kind, fields in events:
            content = msgspec.json.encode({"type": kind, "sequence_number": self._number, **fields})
            written.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), content))
            self._number += 1
        return b"".join(written)

    def _final(self, status: str) -> bytes:
        """The response, which is kept if the client wants that."""
        items = self._output.items
        content = msgspec.json.encode(self._response(status, items))
        if self._turn is not None:
            self._turn.answered = {item["id"]: msgspec.json.encode(item) for item in items}
            self._keep(content, self._turn)
        return content

    def _response(self, status: str, items: list[Any]) -> dict[str, Any]:
        is_over = status != "in_progress"
        incomplete = (
            {"reason": _INCOMPLETE[self._finish]} if status == "incomplete" and self._finish else None
        )
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": int(time.time()) if is_over else None,
            "status": status,
            "model": self._model,
            "error": None,
            "incomplete_details": incomplete,
            **self._repeated,
            "output": items,
            "usage": self._usage_of_response() if is_over else None,
        }

    def _usage_of_response(self) -> dict[str, Any]:
        return usage_of(
            self._usage or ChatUsage(),
            self.predicted.tokens_per_block,
            thoughts=self._output.thoughts,
            prewarms=self._prewarms,
            ttl=self._ttl,
        )
