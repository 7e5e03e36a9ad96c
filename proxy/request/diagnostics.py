"""Prompt-cache diagnostics in answers, for clients that ask for them.

    OpenAI      prompt_cache_options.comparison_response_id → prompt_cache_diagnostics, at a stream's end
    Anthropic   diagnostics.previous_message_id             → diagnostics, at a stream's beginning

On both, the header `x-kvpin-compare-with` asks the same. An earlier answer is named, so kvpin notes the id of
each answer on these routes. All other fields keep their bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from typing_extensions import override

from engine_adapter import (
    UNREADABLE,
    HeaderPairs,
    Headers,
    JsonBody,
    WholeEvents,
    decode_object,
    read_streamed_usage,
)
from proxy.core.misses import Diagnosis, anthropic_diagnostics, openai_diagnostics
from proxy.errors import BadRequest
from proxy.headers import COMPARISON_HEADER
from proxy.request.calls import Client, Through
from proxy.request.translate.chats import ChatUsage

_ERROR = 400
# The first id of a stream is that of its answer.
_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,256})"')

Diagnose = Callable[[int | None], Diagnosis]
"""The diagnosis, from what the engine reports as reused; None: not yet known. The comparison itself was made
before the answer began: an engine may report with each chunk of a stream."""


@dataclass(frozen=True, slots=True)
class Api:
    """The names of an API's diagnostics, and the places where they stand.

    Attributes:
        options, name: the field of a request, and the field within it, that hold the id of the answer to
            compare with.
        field: the field of the answer that holds the diagnostics.
        within: the field of an event that holds the answer; None: the event is a part of it, and shows the
            diagnostics if it has the usage.
        events: the events of a stream that show the diagnostics.
        is_early: these events come before the engine has counted; a count of 0 in them says nothing.
        written: the value of `field`; its argument is None if the named answer is not known.
    """

    options: str
    name: str
    field: str
    within: str | None
    events: tuple[bytes, ...]
    is_early: bool
    written: Callable[[Diagnosis | None], dict[str, Any] | None]

    def asked(self, body: JsonBody, headers: Headers) -> str | None:
        """The id of the answer to compare with; None if no diagnostics are asked for.

        Raises:
            BadRequest: the field has another type.
        """
        if (named := headers.get(COMPARISON_HEADER)) is not None:
            return named
        options = body.hint(self.options)
        if options is not None and not isinstance(options, dict):
            raise BadRequest(f"{self.options} must be an object", param=self.options)
        value = options.get(self.name) if options is not None else None
        if value is not None and not isinstance(value, str):
            field = f"{self.options}.{self.name}"
            raise BadRequest(f"{field} must be the id of an earlier answer, a text", param=field)
        return value


APIS: Mapping[str, Api] = {
    "/v1/responses": Api(
        options="prompt_cache_options",
        name="comparison_response_id",
        field="prompt_cache_diagnostics",
        within="response",
        events=(b'"response.completed"', b'"response.incomplete"'),
        is_early=False,
        written=openai_diagnostics,
    ),
    "/v1/chat/completions": Api(
        options="prompt_cache_options",
        name="comparison_response_id",
        field="prompt_cache_diagnostics",
        within=None,
        events=(b'"usage"',),
        is_early=False,
        written=openai_diagnostics,
    ),
    "/v1/messages": Api(
        options="diagnostics",
        name="previous_message_id",
        field="diagnostics",
        within="message",
        events=(b'"message_start"',),
        is_early=True,
        written=anthropic_diagnostics,
    ),
}
"""Route → the API with diagnostics."""


class Diagnosed(Through):
    """Notes the id of an answer on its way to the client, and adds diagnostics if they were asked for."""

    def __init__(
        self,
        client: Client,
        api: Api,
        *,
        asked: str | None,
        compared: Callable[[], Diagnose | None],
        note_id: Callable[[str], None],
    ) -> None:
        """A client.

        Args:
            client: gets the answer.
            api: its API.
            asked: the id of the answer to compare with; None: no diagnostics are asked for.
            compared: gives the comparison with it; None for an answer that is not known. Asked once the
                answer has begun.
            note_id: gets the id of this answer.
        """
        super().__init__(client)
        self._api = api
        self._asked = asked
        self._compared = compared
        self._note_id = note_id
        self._is_stream = self._is_error = self._has_id = False
        self._events = None if asked is None else WholeEvents()

    @override
    def start(self, status: int, headers: HeaderPairs) -> None:
        self._is_error = status >= _ERROR
        if self._asked is not None:
            headers = [pair for pair in headers if pair[0] != b"content-length"]
        self._client.start(status, headers)

    @override
    def write(self, chunk: bytes) -> None:
        self._is_stream = True
        if whole := self._streamed(chunk):
            self._client.write(whole)

    @override
    def finish(self, chunk: bytes) -> None:
        if self._is_error:
            self._client.finish(chunk)
        elif self._is_stream:
            whole = self._streamed(chunk)
            self._client.finish(whole if self._events is None else whole + self._events.rest)
        else:
            self._note(_id_of(chunk))
            self._client.finish(self._with_field(chunk) if self._asked is not None else chunk)

    def _streamed(self, chunk: bytes) -> bytes:
        """The part of a stream that the client can get now: whole events if one of them may change."""
        if not self._has_id and (found := _ID.search(chunk)) is not None:
            self._note(found[1].decode(errors="replace"))
        if self._events is None:
            if self._has_id:
                self.write = self._client.write  # type: ignore[method-assign]  # nothing more is read
            return chunk
        return b"".join(map(self._event, self._events.feed(chunk)))

    def _event(self, event: bytes) -> bytes:
        """An event, with the diagnostics if they belong to it."""
        start = event.find(b"data:")
        if start < 0 or not any(name in event for name in self._api.events):
            return event
        line = event[start + len(b"data:") :]
        data = line.strip()
        try:
            fields = decode_object(data)
        except UNREADABLE:
            return event
        within = self._api.within
        answer = fields.get(within or "usage")
        if answer is None or bytes(answer) == b"null":
            return event
        if within is None:
            data = self._with_field(data)
        else:
            fields[within] = msgspec.Raw(self._with_field(bytes(answer)))
            data = msgspec.json.encode(fields)
        return event[:start] + b"data: " + data + line[len(line.rstrip()) :]

    def _with_field(self, answer: bytes) -> bytes:
        """The answer with the diagnostics; every other field keeps its bytes."""
        try:
            fields = decode_object(answer)
        except UNREADABLE:
            return answer
        reused = read_streamed_usage(answer).cached_tokens
        is_open = self._is_stream and self._api.is_early
        diagnose = self._compared()
        diagnosis = None if diagnose is None else diagnose((reused or None) if is_open else reused)
        fields[self._api.field] = msgspec.Raw(msgspec.json.encode(self._api.written(diagnosis)))
        return msgspec.json.encode(fields)

    def _note(self, answer_id: str | None) -> None:
        if answer_id is not None:
            self._has_id = True
            self._note_id(answer_id)


class _Answer(msgspec.Struct):
    id: str | None = None


def _id_of(answer: bytes) -> str | None:
    """The id of a whole answer."""
    try:
        return msgspec.json.decode(answer, type=_Answer).id
    except UNREADABLE:
        return None


# `prompt_cache_options`, `prompt_cache_key`, `prompt_cache_retention`, `prompt_cache_breakpoint`.
_FIELDS = b'"prompt_cache_'
_ERROR = 400
_DETAILS = "prompt_tokens_details"


def names_the_cache(body: JsonBody) -> bool:
    """True if a chat has one of OpenAI's fields of the cache."""
    return not body.is_plain and _FIELDS in body.raw


class WritesCounted(Through):
    """Adds `cache_write_tokens` to the usage of an answer on its way to the client."""

    def __init__(self, client: Client, tokens_per_block: Callable[[], int | None]) -> None:
        """`tokens_per_block`: of the engine that answers, asked when its usage comes."""
        super().__init__(client)
        self._block = tokens_per_block
        self._is_stream = self._is_error = False
        self._events = WholeEvents()

    @override
    def start(self, status: int, headers: HeaderPairs) -> None:
        self._is_error = status >= _ERROR
        self._client.start(status, [pair for pair in headers if pair[0] != b"content-length"])

    @override
    def write(self, chunk: bytes) -> None:
        self._is_stream = True
        if whole := b"".join(map(self._event, self._events.feed(chunk))):
            self._client.write(whole)

    @override
    def finish(self, chunk: bytes) -> None:
        if self._is_stream:
            last = b"".join(map(self._event, self._events.feed(chunk)))
            self._client.finish(last + self._events.rest)
        else:
            self._client.finish(chunk if self._is_error else self._counted(chunk))

    def _event(self, event: bytes) -> bytes:
        """An event of a stream, with the count if it has the usage."""
        start = event.find(b"data:")
        if start < 0 or b'"prompt_tokens"' not in event:
            return event
        line = event[start + len(b"data:") :]
        return event[:start] + b"data: " + self._counted(line.strip()) + line[len(line.rstrip()) :]

    def _counted(self, answer: bytes) -> bytes:
        """A whole answer, or a chunk of one, with the count in its usage."""
        try:
            fields = decode_object(answer)
            usage = msgspec.json.decode(fields["usage"], type=dict[str, msgspec.Raw])
            counts = msgspec.json.decode(fields["usage"], type=ChatUsage)
            details = decode_object(usage.get(_DETAILS, b"null")) if counts.prompt_tokens_details else {}
        except (KeyError, *UNREADABLE):
            return answer
        details["cache_write_tokens"] = msgspec.Raw(b"%d" % counts.written(self._block()))
        usage[_DETAILS] = msgspec.Raw(msgspec.json.encode(details))
        fields["usage"] = msgspec.Raw(msgspec.json.encode(usage))
        return msgspec.json.encode(fields)
