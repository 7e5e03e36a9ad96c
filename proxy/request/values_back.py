"""Puts values back where a model repeats their references (`proxy/core/prompt_values.py`).

Rules leave references such as `[[path 1]]` in prompts. A model may write one in a text or in the arguments of
a tool call, and the client must get the path. A stream tells a reference in several pieces: what may be the
beginning of one waits for the next piece of the same text.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any

import msgspec
from typing_extensions import override

from engine_adapter import UNREADABLE, JsonBody, decode_object
from proxy.core.prompt_values import HALF_REFERENCE, REFERENCE, has_reference
from proxy.request.migration import TEXTS
from proxy.request.stages import Event, Stage

_JSON_TEXTS = frozenset({"arguments", "partial_json"})  # strings that hold JSON, in whatever API's form
_ARGUMENTS = ("arguments", "input")  # hold a tool's arguments, also as an object
_OPENERS = frozenset(":,[{")  # of what a string follows
_ANSWERS = frozenset({"content", "text"})  # where an answer's text stands that a client may ask to be JSON
# What a stream of OpenAI's responses tells in pieces of the name `delta`.
_DELTAS = {
    "response.function_call_arguments.delta": "arguments",
    "response.mcp_call_arguments.delta": "arguments",
    "response.output_text.delta": "text",
}
_MOST_HALF = 16  # characters
# Where a value is put into JSON within JSON, the quotes before it tell how deep: this many of them, within so
# many characters.
_MOST_QUOTES, _BEFORE = 16, 1024
_MOST_SLASHES = 64
# Pieces of a text in Anthropic's streams, and the event that tells nothing of a text.
_PIECES, _SILENT = ("text", "thinking", "partial_json"), "ping"
# Which choice of a chat, which of its texts, and the field that the text belongs to.
_Lane = tuple[Hashable, ...]
_decode_text = msgspec.json.Decoder(str).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


class ValuesBack(Stage):
    """Gives the client values in place of the references that an answer repeats."""

    changes = True

    def __init__(self, values: Mapping[str, str], *, answers_json: bool = False) -> None:
        """`values`: reference → value. `answers_json`: the client asked for an answer in JSON."""
        self._values, self._answers_json = values, answers_json
        # A text whose last piece waits → the event that held it, its fields without the piece, and the piece.
        self._waiting: dict[_Lane, tuple[Event, dict[str, Any], str]] = {}
        self._before: dict[_Lane, str] = {}  # the end of each text in JSON

    def _back(self, raw: bytes, name: object = None, *, is_given: bool = False) -> bytes:
        """JSON with values in the place of references. What has none keeps its bytes, and is not even
        decoded: an answer may have many megabytes of log probabilities. `name`: of the field that holds it.
        `is_given`: it is within a tool's arguments, where a field of any name holds a plain text."""
        if not has_reference(raw):
            return raw
        start = raw.lstrip()[:1]
        if start == b'"':
            is_json = not is_given and self._is_json(name)
            return msgspec.json.encode(self._text_back(_decode_text(raw), is_json=is_json, is_given=is_given))
        is_given = is_given or name in _ARGUMENTS
        if start == b"[":
            items = [self._back(bytes(each), name, is_given=is_given) for each in _decode_list(raw)]
            return msgspec.json.encode([*map(msgspec.Raw, items)])
        fields = {
            self._text_back(each, is_json=False): self._back(bytes(inner), each, is_given=is_given)
            for each, inner in decode_object(raw).items()
        }
        return msgspec.json.encode({name: msgspec.Raw(inner) for name, inner in fields.items()})

    def _is_json(self, name: object) -> bool:
        return name in _JSON_TEXTS or (self._answers_json and name in _ANSWERS)

    def _text_back(self, text: str, *, is_json: bool, is_given: bool = False, before: str = "") -> str:
        """A text with values. `is_given`: it is a plain text that may hold JSON. `before`: the text before
        it, which may begin JSON."""
        if "[[" not in text:
            return text
        values, whole = self._values, before + text

        def back(found: re.Match[str]) -> str:
            value = values.get(found[0], found[0])
            if not (is_json or is_given) or (escaped := _escaped(value)) == value:
                return value
            for _ in range(_strings_around(whole, len(before) + found.start(), is_json=is_json)):
                value, escaped = escaped, _escaped(escaped)
            return value

        return REFERENCE.sub(back, text)

    # --- events ---------------------------------------------------------------------------------------

    @override
    def event(self, event: Event) -> Iterable[Event]:
        if event.is_whole:
            with suppress(*UNREADABLE):
                return (event.with_data(self._back(event.raw)),)
            return (event,)
        try:
            fields = msgspec.json.decode(event.data or b"null")
        except UNREADABLE:  # the end mark
            return [*self._rest(), event]
        if not isinstance(fields, dict) or fields.get("type") == _SILENT:
            return (event,)
        pieces, is_changed = [*_pieces(fields)], b"[[" in event.raw
        lanes, choices = {lane for lane, *_ in pieces}, [*_choices(fields)]
        ended = {index for index, choice in choices if choice.get("finish_reason")}
        # The choices that it tells more of, or ends; None if it is about no choice in particular.
        leaves = {lane[0] for lane, holder, name in pieces if holder[name]} if "choices" in fields else None
        if leaves is not None:
            leaves |= ended | {index for index, choice in choices if any(_calls(choice))}
        told = self._rest(leaves, lanes, ended)
        for lane, holder, name in pieces:
            piece = text = holder[name]
            if (waiting := self._waiting.pop(lane, None)) is not None:
                text = waiting[2] + text
            is_json, before = self._is_json(lane[-1]), self._before.get(lane, "")
            text = self._text_back(text, is_json=is_json, before=before)
            half = HALF_REFERENCE.search(text, max(len(text) - _MOST_HALF, 0))
            if half is not None and lane[0] not in ended:
                text = text[: half.start()]
                self._waiting[lane] = event, fields, half[0]
            if is_json:
                self._before[lane] = (before + text)[-_BEFORE:]
            holder[name] = text
            is_changed |= text != piece
        return [*told, event.with_data(self._back(msgspec.json.encode(fields))) if is_changed else event]

    @override
    def end(self) -> Iterable[Event]:
        return self._rest()

    def _rest(
        self,
        leaves: AbstractSet[Hashable] | None = None,
        told: AbstractSet[_Lane] = frozenset(),
        ended: AbstractSet[int] = frozenset(),
    ) -> list[Event]:
        """Events with what waits, where it is no reference: its text does not go on in this event, or behind
        it. Arguments of a call may go on behind those of another. `leaves`: the choices whose texts do not go
        on behind the event; None: those of all. `told`: the texts that the event goes on with. `ended`: the
        choices that it ends."""
        rest: list[Event] = []
        for lane in [*self._waiting]:
            stays = lane in told or not (leaves is None or lane[0] in leaves)
            if stays or (told and lane[0] not in ended and lane[-1] in _JSON_TEXTS):
                continue
            event, held_by, piece = self._waiting.pop(lane)
            for other, holder, name in _pieces(held_by):
                holder[name] = piece if other == lane else ""
            for _, choice in _choices(held_by):
                for call in _calls(choice):  # clients add up what they get of a call
                    call.pop("id", None)
                    call["function"].pop("name", None)
            rest.append(event.with_data(msgspec.json.encode(held_by)))
        return rest


def _escaped(text: str) -> str:
    """A text as it is written within a JSON string."""
    return msgspec.json.encode(text)[1:-1].decode()


def _strings_around(text: str, at: int, *, is_json: bool) -> int:
    """The number of JSON strings, one within the other, that a place in a text is in. The text is JSON, or is
    plain and may be. A quote that begins a string within n others has 2**n - 1 backslashes before it."""
    least = int(is_json)
    end, first, deepest, lowest = at, max(at - _BEFORE, 0), 0, 0
    for _ in range(_MOST_QUOTES):
        if (quote := text.rfind('"', first, end)) < 0:
            break
        head = text[max(quote - _MOST_SLASHES, 0) : quote]
        end = quote - (len(head) - len(head.rstrip("\\")))
        n_slashes = quote - end
        level = (n_slashes + 1).bit_length()
        if (
            (not deepest or level < lowest)
            and n_slashes & (n_slashes + 1) == 0
            and text[max(end - _MOST_SLASHES, 0) : end].rstrip()[-1:] in _OPENERS
        ):
            if not deepest or not _is_json_from(text, quote + 1):  # a text that has quotes is no JSON
                deepest = level
            lowest = level
        if is_json and not n_slashes:  # the string that holds all others
            return deepest if deepest and _is_json_from(text, quote + 1) else least
    if not is_json and not _is_json_from(text, 0):
        return least
    return max(deepest, least)


def _is_json_from(text: str, at: int) -> bool:
    """True if it goes on there as JSON does."""
    beginning = text[at : at + _MOST_SLASHES].lstrip()
    return beginning[:1] in ("{", "[") and not REFERENCE.match(beginning)


def _choices(fields: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The choices in a chunk of a chat, with their numbers."""
    choices = fields.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            yield _number(choice), choice


def _number(part: Mapping[str, Any]) -> int:
    index = part.get("index")
    return index if isinstance(index, int) else 0


def _calls(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    delta = choice.get("delta")
    calls = delta.get("tool_calls") if isinstance(delta, dict) else None
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            yield call


def _pieces(fields: dict[str, Any]) -> Iterator[tuple[_Lane, dict[str, Any], str]]:
    """The pieces of texts in an event: the text that it belongs to, what holds it, and the name of its
    field."""
    for index, choice in _choices(fields):
        if isinstance(inner := choice.get("delta"), dict):
            yield from _named(inner, TEXTS, (index,))
            if isinstance(called := inner.get("function_call"), dict):  # as clients called tools before
                yield from _named(called, ("arguments",), (index, "function_call"))
            for call in _calls(choice):
                yield from _named(call["function"], ("arguments",), (index, _number(call)))
    delta = fields.get("delta")
    if isinstance(delta, dict):
        yield from _named(delta, _PIECES, (None, _number(fields)))
    elif isinstance(delta, str):
        places = (fields.get(name) for name in ("type", "item_id", "content_index", "summary_index"))
        yield (None, *map(str, places), _DELTAS.get(str(fields.get("type")), "delta")), fields, "delta"


def _named(
    holder: dict[str, Any], names: tuple[str, ...], lane: _Lane
) -> Iterator[tuple[_Lane, dict[str, Any], str]]:
    for name in names:
        if isinstance(holder.get(name), str):
            yield (*lane, name), holder, name


def answers_json(body: JsonBody) -> bool:
    """True if a request asks for an answer in JSON, in whatever API's form."""
    formats = [body.hint("response_format"), body.hint("output_format")]
    formats += [
        each.get("format") for name in ("text", "output_config") if isinstance(each := body.hint(name), dict)
    ]
    return any(isinstance(each, dict) and str(each.get("type")).startswith("json") for each in formats)
