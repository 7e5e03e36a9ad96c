"""Prompt-cache diagnostics in answers, for clients that ask for them.

    OpenAI      prompt_cache_options.comparison_response_id → prompt_cache_diagnostics, at a stream's end
    Anthropic   diagnostics.previous_message_id             → diagnostics, at a stream's beginning

On both, the header `x-kvpin-compare-with` asks the same. An earlier answer is named, so kvpin notes the id of
each answer on these routes. All other fields keep their bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from typing_extensions import override

from engine_adapter import (
    UNREADABLE,
    Headers,
    JsonBody,
    decode_object,
    read_streamed_usage,
)
from proxy.core.misses import Diagnosis, anthropic_diagnostics, openai_diagnostics
from proxy.errors import BadRequest
from proxy.headers import COMPARISON_HEADER
from proxy.request.records import RequestRecord
from proxy.request.stages import ERROR, Event, Stage
from proxy.request.translate.chats import ChatUsage

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


class IdNoted(Stage):
    """Notes the id of an answer on its way to the client: later requests may ask to be compared with it."""

    def __init__(self, record: RequestRecord) -> None:
        self._record, self.marks = record, (b'"id"',)

    @override
    def event(self, event: Event) -> Iterable[Event]:
        if not event.is_whole:
            if (found := _ID.search(event.raw)) is not None and self.marks:
                self._record.answer_id, self.marks = found[1].decode(errors="replace"), ()
        elif self.status < ERROR:
            if (found := _ID.match(event.raw, 1)) is not None:  # most answers begin with it
                self._record.answer_id = found[1].decode(errors="replace")
            else:
                with suppress(*UNREADABLE):
                    self._record.answer_id = msgspec.json.decode(event.raw, type=_Answer).id
        return (event,)


class _Answer(msgspec.Struct):
    id: str | None = None


class Rewritten(Stage):
    """Changes the JSON of an answer on its way to the client: a whole answer, and the events of a stream that
    hold one of `marks`. Errors, and all that `_changed` cannot read, keep their bytes."""

    changes = True

    @override
    def event(self, event: Event) -> Iterable[Event]:
        if event.is_whole and self.status >= ERROR:
            return (event,)
        with suppress(KeyError, *UNREADABLE):
            if (changed := self._changed(event)) is not None:
                return (event.with_data(changed),)
        return (event,)

    def _changed(self, event: Event) -> bytes | None:
        """The data with the change; None if there is none. Raises KeyError, or an error of UNREADABLE."""
        raise NotImplementedError


class Diagnosed(Rewritten):
    """Adds the diagnostics that a client asked for.

    Attributes:
        diagnose: the comparison with the answer that the client named; None if that is not known. Set before
            the answer begins.
    """

    def __init__(self, api: Api) -> None:
        self._api, self.marks = api, api.events
        self.diagnose: Diagnose | None = None

    @override
    def _changed(self, event: Event) -> bytes | None:
        within, is_early = self._api.within, self._api.is_early
        if event.is_whole:
            return self._with_field(event)
        part = Event(bytes(event.fields[within or "usage"]), is_whole=True)
        if part.raw == b"null":
            return None
        if within is None:
            return self._with_field(event, is_early=is_early)
        told = msgspec.Raw(self._with_field(part, is_early=is_early))
        return msgspec.json.encode(event.fields | {within: told})

    def _with_field(self, answer: Event, *, is_early: bool = False) -> bytes:
        """The answer with the diagnostics; every other field keeps its bytes."""
        reused = read_streamed_usage(answer.data).cached_tokens
        if is_early:
            reused = reused or None
        diagnosis = None if self.diagnose is None else self.diagnose(reused)
        told = msgspec.Raw(msgspec.json.encode(self._api.written(diagnosis)))
        return msgspec.json.encode(answer.fields | {self._api.field: told})


# `prompt_cache_options`, `prompt_cache_key`, `prompt_cache_retention`, `prompt_cache_breakpoint`.
_FIELDS = b'"prompt_cache_'
_DETAILS = "prompt_tokens_details"


def names_the_cache(body: JsonBody) -> bool:
    """True if a chat has one of OpenAI's fields of the cache."""
    return _FIELDS in body.raw


class WritesCounted(Rewritten):
    """Adds `cache_write_tokens` to the usage of an answer."""

    marks = (b'"prompt_tokens"',)

    def __init__(self, tokens_per_block: Callable[[], int | None]) -> None:
        """`tokens_per_block`: of the engine that answers, asked when its usage comes."""
        self._block = tokens_per_block

    @override
    def _changed(self, event: Event) -> bytes:
        given = event.fields["usage"]
        usage = msgspec.json.decode(given, type=dict[str, msgspec.Raw])
        counts = msgspec.json.decode(given, type=ChatUsage)
        details = decode_object(usage.get(_DETAILS, b"null")) if counts.prompt_tokens_details else {}
        details["cache_write_tokens"] = msgspec.Raw(b"%d" % counts.written(self._block()))
        usage[_DETAILS] = msgspec.Raw(msgspec.json.encode(details))
        return msgspec.json.encode(event.fields | {"usage": msgspec.Raw(msgspec.json.encode(usage))})
