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

from engine_adapter import UNREADABLE, Headers, JsonBody, decode_object
from engine_adapter.http.answer_fields import NULL, read_streamed_usage
from proxy.core.misses import Diagnosis, Miss, detail_of
from proxy.errors import BadRequest
from proxy.headers import COMPARISON_HEADER
from proxy.request.comparison import Diagnose
from proxy.request.records import RequestRecord
from proxy.request.stages import ERROR, Event, Stage
from proxy.request.translate.translation import ChatUsage

# The first id of a stream is that of its answer.
_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,256})"')
_COMPARISON = COMPARISON_HEADER.encode()
# Miss → the words of OpenAI's and of Anthropic's API for it.
_WORDS = {
    Miss.MODEL: ("model_changed", "model_changed"),
    Miss.LORA: ("model_changed", "model_changed"),
    Miss.TOOLS: ("tools_changed", "tools_changed"),
    Miss.SYSTEM: ("input_changed", "system_changed"),
    **dict.fromkeys(
        (Miss.SHARED, Miss.INPUT, Miss.MEDIA, Miss.TEMPLATE), ("input_changed", "messages_changed")
    ),
}
# Options that OpenAI's API has a reason for.
_OPENAI_OPTIONS = {
    "text": "text_format_changed",
    "response_format": "text_format_changed",
    "reasoning": "reasoning_effort_changed",
    "reasoning_effort": "reasoning_effort_changed",
    "verbosity": "verbosity_changed",
}


def openai_diagnostics(diagnosis: Diagnosis | None) -> dict[str, Any]:
    """The `prompt_cache_diagnostics` of a response; None: the compared response is not known. `unavailable`
    stands for reasons that the API has no word for; the field `kvpin` then names the reason."""
    if diagnosis is None:
        return {"type": "comparison_response_not_found"}
    miss, at = diagnosis.miss, diagnosis.at
    if miss is Miss.HIT:
        return {"type": "cache_hit"}
    option = _OPENAI_OPTIONS.get(at.field) if at is not None and miss is Miss.OPTION else None
    reason, compared = option or _WORDS.get(miss, (None,))[0], diagnosis.compared
    if reason is None or compared is None:
        return {"type": "unavailable", "kvpin": _own_words(diagnosis)}
    return {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": max((diagnosis.n_tokens or 0) - compared.common_tokens, 0),
        "comparison_reusable_tokens": compared.n_tokens,
        "kvpin": _own_words(diagnosis),
    }


def anthropic_diagnostics(diagnosis: Diagnosis | None) -> dict[str, Any] | None:
    """The `diagnostics` of a message. The argument is None if the earlier message is not known. The result
    is None if the prompt does not diverge, as in Anthropic's API."""
    if diagnosis is None:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    if diagnosis.miss is Miss.HIT:
        return None
    _, kind = _WORDS.get(diagnosis.miss, ("", "unavailable"))
    reason: dict[str, Any] = {"type": kind}
    if (compared := diagnosis.compared) is not None and diagnosis.miss in _WORDS:
        shorter = min(diagnosis.n_tokens or 0, compared.n_tokens)
        reason["cache_missed_input_tokens"] = max(shorter - compared.common_tokens, 0)
    return {"cache_miss_reason": {**reason, "kvpin": _own_words(diagnosis)}}


def _own_words(diagnosis: Diagnosis) -> dict[str, Any]:
    """The reason and the detail in kvpin's own words, for which the APIs have no field."""
    words: dict[str, Any] = {"reason": diagnosis.miss.value, "detail": detail_of(diagnosis)}
    if diagnosis.at is not None:
        words["at"] = msgspec.to_builtins(diagnosis.at)
    return words


@dataclass(frozen=True, slots=True)
class Api:
    """The names of an API's diagnostics, and the places where they stand."""

    options: str  # the field of a request that has the field `name`
    name: str  # that holds the id of the answer to compare with
    field: str  # the field of the answer that holds the diagnostics
    # The field of an event that holds the answer; None: the event is a part of it, and shows the diagnostics
    # if it has the usage.
    within: str | None
    events: tuple[bytes, ...]  # the events of a stream that show the diagnostics
    is_early: bool  # these events come before the engine has counted; a count of 0 in them says nothing
    # The value of `field`; its argument is None if the named answer is not known.
    written: Callable[[Diagnosis | None], dict[str, Any] | None]

    def asked(self, body: JsonBody, headers: Headers) -> str | None:
        """The id of the answer to compare with; None if no diagnostics are asked for. Raises BadRequest if
        the field has another type."""
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


class _Answer(msgspec.Struct):
    id: str | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


class IdNoted(Stage):
    """Notes the id of an answer on its way to the client: later requests may ask to be compared with it."""

    def __init__(self, record: RequestRecord) -> None:
        self._record, self.marks = record, (b'"id"',)

    @override
    def event(self, event: Event) -> Iterable[Event]:
        if event.is_whole:
            if (found := _ID.match(event.raw, 1)) is not None:  # most answers begin with it
                self._record.answer_id = found[1].decode(errors="replace")
            else:
                with suppress(*UNREADABLE):
                    self._record.answer_id = _decode_answer(event.raw).id
        elif self.marks and (found := _ID.search(event.raw)) is not None:
            self._record.answer_id, self.marks = found[1].decode(errors="replace"), ()
        return (event,)


# Gives the data of an event with the change; None if there is none. Raises KeyError, or UNREADABLE.
_Change = Callable[[Event], bytes | None]


class Rewritten(Stage):
    """Changes the JSON of an answer on its way to the client: a whole answer, and some events of a stream.
    Errors, and all that cannot be read, keep their bytes."""

    changes = True

    def __init__(self, marks: tuple[bytes, ...], changed: _Change) -> None:
        """`marks`: an event is changed if it holds one of these."""
        self.marks, self._changed = marks, changed

    @override
    def event(self, event: Event) -> Iterable[Event]:
        if event.is_whole and self.status >= ERROR:
            return (event,)
        with suppress(KeyError, *UNREADABLE):
            if (changed := self._changed(event)) is not None:
                return (event.with_data(changed),)
        return (event,)


def diagnosed(api: Api, diagnose: Callable[[], Diagnose | None]) -> Rewritten:
    """Gives an answer the diagnostics that its client asked for; every other field keeps its bytes.
    `diagnose`: the comparison with the answer that it named, None if that is not known; asked when the
    diagnostics are due."""

    def with_diagnostics(event: Event) -> bytes | None:
        fields, within = event.fields, None if event.is_whole else api.within
        if not event.is_whole and fields[within or "usage"] == NULL:
            return None
        answer = fields if within is None else decode_object(fields[within])
        reused = read_streamed_usage(event.data).cached_tokens
        if not event.is_whole and api.is_early:
            reused = reused or None
        compared = diagnose()
        told = api.written(None if compared is None else compared(reused))
        answer = answer | {api.field: msgspec.Raw(msgspec.json.encode(told))}
        if within is not None:
            answer = fields | {within: msgspec.Raw(msgspec.json.encode(answer))}
        return msgspec.json.encode(answer)

    return Rewritten(api.events, with_diagnostics)


_DETAILS = "prompt_tokens_details"


def writes_counted(tokens_per_block: Callable[[], int | None]) -> Rewritten:
    """Gives an answer `cache_write_tokens` in its usage. `tokens_per_block`: of the engine that answers,
    asked when its usage comes."""

    def counted(event: Event) -> bytes:
        given = event.fields["usage"]
        usage = msgspec.json.decode(given, type=dict[str, msgspec.Raw])
        counts = msgspec.json.decode(given, type=ChatUsage)
        details = decode_object(usage.get(_DETAILS, b"null")) if counts.prompt_tokens_details else {}
        details["cache_write_tokens"] = msgspec.Raw(b"%d" % counts.written(tokens_per_block()))
        usage[_DETAILS] = msgspec.Raw(msgspec.json.encode(details))
        return msgspec.json.encode(event.fields | {"usage": msgspec.Raw(msgspec.json.encode(usage))})

    return Rewritten((b'"prompt_tokens"',), counted)
