"""Prompt-cache diagnostics in answers, for clients that ask for them.

    OpenAI      prompt_cache_options.comparison_response_id → prompt_cache_diagnostics, at a stream's end
    Anthropic   diagnostics.previous_message_id             → diagnostics, at a stream's beginning

On both, the header `x-kvpin-compare-with` asks the same. An earlier answer is named, so kvpin notes the id of
each answer on these routes. All other fields keep their bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
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
from proxy.request.calls import Through, Writer
from proxy.request.records import RequestRecord
from proxy.request.translate.chats import ChatUsage

_ERROR = 400
# The first id of a stream is that of its answer.
_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,256})"')

_COMPARISON = COMPARISON_HEADER.encode()
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
        if _COMPARISON in headers.first:
            return headers.get(COMPARISON_HEADER)
        options = None if body.is_plain else body.hint(self.options)
        if options is not None and not isinstance(options, dict):
            raise BadRequest(f"{self.options} must be an object", param=self.options)
        value = options.get(self.name) if options is not None else None
        if value is not None and not isinstance(value, str):
            field = f"{self.options}.{self.name}"
            raise BadRequest(f"{field} must be the id of an earlier answer, a text", param=field)
        return value


_RESPONSES = Api(
    options="prompt_cache_options",
    name="comparison_response_id",
    field="prompt_cache_diagnostics",
    within="response",
    events=(b'"response.completed"', b'"response.incomplete"'),
    is_early=False,
    written=openai_diagnostics,
)
APIS: Mapping[str, Api] = {
    "/v1/responses": _RESPONSES,
    "/v1/chat/completions": replace(_RESPONSES, within=None, events=(b'"usage"',)),
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


class IdNoted(Through):
    """Notes the id of an answer on its way to the client: later requests may ask to be compared with it."""

    def __init__(self, client: Writer, record: RequestRecord) -> None:
        self._client, self._record = client, record
        self._is_stream = self._is_error = False

    @override
    def start(self, status: int, headers: HeaderPairs) -> None:
        self._is_error = status >= _ERROR
        self._client.start(status, headers)

    @override
    def write(self, chunk: bytes) -> None:
        self._is_stream = True
        if self._finds_id(chunk):
            self.write = self._client.write  # type: ignore[method-assign]  # nothing more is read
        self._client.write(chunk)

    @override
    def finish(self, chunk: bytes) -> None:
        if self._is_stream:
            self._finds_id(chunk)
        elif not self._is_error:
            if (found := _ID.match(chunk, 1)) is not None:  # most answers begin with it
                self._record.answer_id = found[1].decode(errors="replace")
            else:
                with suppress(*UNREADABLE):
                    self._record.answer_id = msgspec.json.decode(chunk, type=_Answer).id
        self._client.finish(chunk)

    def _finds_id(self, chunk: bytes) -> bool:
        """Notes the first id in a stream. True once it is known."""
        if self._record.answer_id is None and (found := _ID.search(chunk)) is not None:
            self._record.answer_id = found[1].decode(errors="replace")
        return self._record.answer_id is not None


class _Answer(msgspec.Struct):
    id: str | None = None


class Rewritten(Through):
    """Changes the JSON of an answer on its way to the client: a whole answer, and the events of a stream that
    hold one of `_marks`. Errors, and all that `_changed` cannot read, keep their bytes."""

    _marks: tuple[bytes, ...]

    def __init__(self, client: Writer) -> None:
        super().__init__(client)
        self._is_stream = self._is_error = False
        self._events = WholeEvents()

    def _changed(self, data: bytes) -> bytes:
        """A whole answer, or the data of an event. Raises KeyError, or an error of UNREADABLE."""
        raise NotImplementedError

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
            self._client.finish(chunk if self._is_error else self._or_as_it_was(chunk))

    def _event(self, event: bytes) -> bytes:
        start = event.find(b"data:")
        if start < 0 or not any(mark in event for mark in self._marks):
            return event
        line = event[start + len(b"data:") :]
        data = line.strip()
        if (changed := self._or_as_it_was(data)) is data:
            return event
        return event[:start] + b"data: " + changed + line[len(line.rstrip()) :]

    def _or_as_it_was(self, data: bytes) -> bytes:
        try:
            return self._changed(data)
        except (KeyError, *UNREADABLE):
            return data


class Diagnosed(Rewritten):
    """Adds the diagnostics that a client asked for.

    Attributes:
        diagnose: the comparison with the answer that the client named; None if that is not known. Set before
            the answer begins.
    """

    def __init__(self, client: Writer, api: Api) -> None:
        super().__init__(client)
        self._api, self._marks = api, api.events
        self.diagnose: Diagnose | None = None

    @override
    def _changed(self, data: bytes) -> bytes:
        within = self._api.within
        if not self._is_stream:
            return self._with_field(data)
        fields = decode_object(data)
        part = bytes(fields[within or "usage"])
        if part == b"null":
            return data
        if within is None:
            return self._with_field(data)
        fields[within] = msgspec.Raw(self._with_field(part))
        return msgspec.json.encode(fields)

    def _with_field(self, answer: bytes) -> bytes:
        """The answer with the diagnostics; every other field keeps its bytes."""
        fields = decode_object(answer)
        reused = read_streamed_usage(answer).cached_tokens
        is_open = self._is_stream and self._api.is_early
        diagnosis = None if self.diagnose is None else self.diagnose((reused or None) if is_open else reused)
        fields[self._api.field] = msgspec.Raw(msgspec.json.encode(self._api.written(diagnosis)))
        return msgspec.json.encode(fields)


# `prompt_cache_options`, `prompt_cache_key`, `prompt_cache_retention`, `prompt_cache_breakpoint`.
_FIELDS = b'"prompt_cache_'
_DETAILS = "prompt_tokens_details"


def names_the_cache(body: JsonBody) -> bool:
    """True if a chat has one of OpenAI's fields of the cache."""
    return _FIELDS in body.raw


class WritesCounted(Rewritten):
    """Adds `cache_write_tokens` to the usage of an answer."""

    _marks = (b'"prompt_tokens"',)

    def __init__(self, client: Writer, tokens_per_block: Callable[[], int | None]) -> None:
        """`tokens_per_block`: of the engine that answers, asked when its usage comes."""
        super().__init__(client)
        self._block = tokens_per_block

    @override
    def _changed(self, data: bytes) -> bytes:
        fields = decode_object(data)
        usage = msgspec.json.decode(fields["usage"], type=dict[str, msgspec.Raw])
        counts = msgspec.json.decode(fields["usage"], type=ChatUsage)
        details = decode_object(usage.get(_DETAILS, b"null")) if counts.prompt_tokens_details else {}
        details["cache_write_tokens"] = msgspec.Raw(b"%d" % counts.written(self._block()))
        usage[_DETAILS] = msgspec.Raw(msgspec.json.encode(details))
        fields["usage"] = msgspec.Raw(msgspec.json.encode(usage))
        return msgspec.json.encode(fields)
