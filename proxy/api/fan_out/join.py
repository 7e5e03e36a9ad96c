"""The answers of single requests, joined into the one that the client asked for.

Id, time, model and all fields that are not named here are those of the first answer. Usage is counted as in
engines that run several choices themselves: the tokens of a prompt, and how many of them were cached, count
once, for its first choice; the tokens of all answers are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Raw
from typing_extensions import override

from engine_adapter import UNREADABLE, RawFields, decode_object
from engine_adapter.http.answer_fields import NULL, choices_of, decode_choices, is_usage_alone
from proxy.api.fan_out.split import AnswerPlace, Several
from proxy.errors import EngineFailed
from proxy.request.stages import DONE, Event

_encode = msgspec.json.encode
_LAST = b"data: " + DONE + b"\n\n"
# Fields of a stream's events that are equal in all of them.
_OF_ALL = ("id", "created", "model")
_OF_THE_ANSWER = ("completion_tokens", "completion_tokens_details")


class SingleAnswer(msgspec.Struct):
    """The JSON answer to a single request; `usage` is None if the engine reported none."""

    fields: RawFields
    choices: list[RawFields]
    usage: dict[str, Any] | None

    @classmethod
    def of(cls, content: bytes) -> SingleAnswer:
        """Raises EngineFailed if it is no chat or completion."""
        try:
            fields = decode_object(content)
            choices = decode_choices(fields["choices"])
        except (*UNREADABLE, KeyError) as error:
            raise EngineFailed("an engine's answer to a single request has no choices") from error
        choices.sort(key=_index)
        return cls(fields, choices, _usage_in(fields))


def usage_of(
    usages: Iterable[tuple[AnswerPlace, Mapping[str, Any] | None]], cached: int | None = None
) -> dict[str, Any] | None:
    """The usage of all parts, which come in their order; None if no engine reported any.

    Args:
        usages: each part's.
        cached: prompt tokens that were cached before kvpin let the prompt be computed; None if it did not.
    """
    total: dict[str, Any] = {}
    prompt = None
    for place, usage in usages:
        if usage is None:
            continue
        is_first, prompt = place.prompt != prompt, place.prompt
        _add(total, usage if is_first else {name: usage.get(name) for name in _OF_THE_ANSWER})
    match total:
        case {"prompt_tokens": int() | float() as asked, "completion_tokens": int() | float() as made}:
            total["total_tokens"] = asked + made
    if cached is not None and isinstance(total.get("prompt_tokens_details"), dict):
        total["prompt_tokens_details"]["cached_tokens"] = cached
    return total or None


class Joined:
    """The answers of several requests, as that of one: whole ones, or the events of streams. `cached`: prompt
    tokens that were cached before kvpin let the prompt be computed; None if it did not."""

    def __init__(self, several: Several) -> None:
        self.cached: int | None = None
        self._several = several
        self._head: RawFields = {}
        self._usages: dict[int, tuple[AnswerPlace, RawFields, dict[str, Any]]] = {}

    def whole(self, answers: Iterable[tuple[AnswerPlace, bytes]]) -> bytes:
        """The one answer. `answers` are those of all parts, in their order. Raises EngineFailed: one of them
        is no chat or completion."""
        several, pairs = self._several, [(place, SingleAnswer.of(content)) for place, content in answers]
        of_prompts: dict[int, list[RawFields]] = {}
        for place, answer in pairs:
            of_prompts.setdefault(place.prompt, []).extend(answer.choices)
        choices = []
        for number, made in of_prompts.items():
            kept = sorted(made, key=_score, reverse=True)[: several.choices] if several.picks else made
            for at, choice in enumerate(kept):
                choice["index"] = _raw(number * several.choices + at)
                if several.hides_logprobs:
                    choice["logprobs"] = NULL
                choices.append(choice)
        fields = {**pairs[0][1].fields, "choices": _raw(choices)}
        usage = usage_of(((place, answer.usage) for place, answer in pairs), self.cached)
        if usage is not None:
            fields["usage"] = _raw(usage)
        return _encode(fields)

    def event(self, place: AnswerPlace, event: Event) -> bytes:
        """Turns a part's event into the client's. Returns b"" for usage, which is held back, and for the end.
        Raises EngineFailed: it is no event of a chat or completion."""
        if event.data == DONE:
            return b""
        try:
            choices = choices_of(event.fields)
            usage = _usage_in(event.fields) if is_usage_alone(event.fields, choices) else None
        except UNREADABLE as error:
            raise EngineFailed("an engine's stream has an event that is none of a chat") from error
        if not self._head:
            self._head = {name: event.fields[name] for name in _OF_ALL if name in event.fields}
        fields = event.fields | self._head
        if usage is not None:
            self._usages[place.index] = place, fields, usage
            return b""
        if choices:
            for choice in choices:
                choice["index"] = _raw(place.index + _index(choice))
            fields["choices"] = _raw(choices)
        return b"data: " + _encode(fields) + b"\n\n"

    def ends(self, event: Event) -> bool:
        """True if an event is the last of a part."""
        return event.data == DONE

    def end(self) -> bytes:
        """The last events, when all streams have ended: usage, if the engines sent it, and the end."""
        if not self._usages:
            return _LAST
        usages = [self._usages[index] for index in sorted(self._usages)]
        total = usage_of(((place, usage) for place, _, usage in usages), self.cached)
        return b"data: " + _encode({**usages[0][1], "choices": [], "usage": total}) + b"\n\n" + _LAST


def is_error(event: Event) -> bool:
    """True if an event says that the stream has failed."""
    if b'"error"' not in event.data:
        return False
    try:
        return event.fields.get("error", NULL) != NULL
    except UNREADABLE:
        return False


def _value(fields: RawFields, name: str) -> Any:  # noqa: ANN401 - JSON
    """A field's value; None if there is none, or none that can be read."""
    try:
        return msgspec.json.decode(fields.get(name, NULL))
    except UNREADABLE:
        return None


def _usage_in(fields: RawFields) -> dict[str, Any] | None:
    usage = _value(fields, "usage")
    return usage if isinstance(usage, dict) else None


def _raw(value: object) -> Raw:
    return Raw(_encode(value))


def _index(choice: RawFields) -> int:
    """A choice's own index; 0 if it has none."""
    index = _value(choice, "index")
    return index if isinstance(index, int) else 0


def _add(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Adds each count of `more` to the same count of `total`. Counts of different types are left out."""
    for name, value in more.items():
        known = total.get(name)
        if isinstance(value, dict) and (known is None or isinstance(known, dict)):
            _add(total.setdefault(name, {}), value)
        elif isinstance(value, int | float) and not isinstance(known, dict):
            total[name] = (known or 0) + value


def _score(choice: RawFields) -> float:
    """Mean log probability of a choice's tokens; as low as can be if it does not tell them."""
    match _value(choice, "logprobs"):
        case {"token_logprobs": list(values)}:
            pass
        case {"content": list(tokens)}:
            values = [token.get("logprob") for token in tokens if isinstance(token, dict)]
        case _:
            values = []
    known = [value for value in values if isinstance(value, int | float)]
    return sum(known) / len(known) if known else float("-inf")


class JoinedList(Joined):
    """The answers of several requests, as a list; the events of streams, of which each says `stop` last."""

    @override
    def whole(self, answers: Iterable[tuple[AnswerPlace, bytes]]) -> bytes:
        return _encode([_numbered(place, Event(content, is_whole=True)) for place, content in answers])

    @override
    def event(self, place: AnswerPlace, event: Event) -> bytes:
        fields = {} if event.data == b"null" else _numbered(place, event)
        return b"data: " + _encode(fields) + b"\n\n" if fields else b""

    @override
    def ends(self, event: Event) -> bool:
        return b'"stop":true' in event.data

    @override
    def end(self) -> bytes:
        return b""  # these streams have no event for their end


def _numbered(place: AnswerPlace, answer: Event) -> RawFields:
    """The fields of an answer to a single request, or of an event of one, with the index of their place."""
    try:
        fields = answer.fields
    except UNREADABLE as error:
        raise EngineFailed("an engine's answer to a single request is no object") from error
    return fields | {"index": Raw(b"%d" % place.index)} if "index" in fields else fields
