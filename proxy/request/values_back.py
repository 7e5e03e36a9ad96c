"""Puts values back where a model repeats their references (`proxy/core/prompt_values.py`).

Rules leave references such as `[[path 1]]` in prompts. A model may write one in a text or in the arguments of
a tool call, and the client must get the path. A stream tells a reference in several
pieces: what may be the beginning of one waits for the next piece of the same text.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import msgspec
from typing_extensions import override

from engine_adapter import UNREADABLE, HeaderPairs, WholeEvents
from proxy.core.prompt_values import HALF_REFERENCE, REFERENCE
from proxy.request.calls import Client, Through
from proxy.request.transcript import TEXTS

_STREAM = b"text/event-stream"
# Strings that hold JSON, in whatever API's form.
_JSON_TEXTS = frozenset({"arguments", "partial_json"})
_ARGUMENTS_PIECE = "response.function_call_arguments.delta"
_MOST_HALF = 16  # characters
# Pieces of a text in Anthropic's streams, and the event that tells nothing of a text.
_PIECES, _SILENT = ("text", "thinking", "partial_json"), "ping"
# Which choice of a chat, and which of its texts.
_Lane = tuple[Hashable, ...]


class ValuesBack(Through):
    """The client of an answer to a prompt with references: it gets the values."""

    def __init__(self, client: Client, values: Mapping[str, str]) -> None:
        """`values`: reference → value."""
        super().__init__(client)
        self._values = values
        self._is_stream = False
        self._events = WholeEvents()
        self._whole: list[bytes] = []  # pieces of any other answer
        # A text whose last piece waits → the event that held it, without that piece, and the piece.
        self._waiting: dict[_Lane, tuple[bytes, dict[str, Any], str]] = {}

    @override
    def start(self, status: int, headers: HeaderPairs) -> None:
        self._is_stream = any(
            name == b"content-type" and value.startswith(_STREAM) for name, value in headers
        )
        self._client.start(status, [pair for pair in headers if pair[0] != b"content-length"])

    @override
    def write(self, chunk: bytes) -> None:
        if not self._is_stream:
            self._whole.append(chunk)
        elif whole := b"".join(map(self._event, self._events.feed(chunk))):
            self._client.write(whole)

    @override
    def finish(self, chunk: bytes) -> None:
        if self._is_stream:
            last = b"".join(map(self._event, self._events.feed(chunk)))
            self._client.finish(last + self._rest() + self._events.take_rest())
        else:
            self._client.finish(self._of_whole(b"".join([*self._whole, chunk])))

    def _of_whole(self, answer: bytes) -> bytes:
        if b"[[" not in answer:
            return answer
        try:
            return msgspec.json.encode(self._back(msgspec.json.decode(answer)))
        except UNREADABLE:
            return answer

    def _back(self, value: Any, name: object = None) -> Any:  # noqa: ANN401 - JSON
        """JSON with values in the place of references. `name`: of the field that holds it."""
        match value:
            case str():
                return self._text_back(value, is_json=name in _JSON_TEXTS)
            case list():
                return [self._back(each) for each in value]
            case dict():
                return {each: self._back(inner, each) for each, inner in value.items()}
            case _:
                return value

    def _text_back(self, text: str, *, is_json: bool) -> str:
        if "[[" not in text:
            return text
        values = self._values

        def back(found: Any) -> str:  # noqa: ANN401 - re.Match[str]
            value = values.get(found[0], found[0])
            return msgspec.json.encode(value)[1:-1].decode() if is_json else value

        return REFERENCE.sub(back, text)

    # --- streams --------------------------------------------------------------------------------------

    def _event(self, event: bytes) -> bytes:
        start = event.find(b"data:")
        try:
            fields = msgspec.json.decode(event[start + len(b"data:") :]) if start >= 0 else None
        except UNREADABLE:  # the end mark
            return self._rest() + event
        if not isinstance(fields, dict) or fields.get("type") == _SILENT:
            return event
        head, pieces, is_changed = event[:start], [*_pieces(fields)], b"[[" in event
        told = self._rest(fields, {lane for lane, *_ in pieces})
        for lane, holder, name, is_json in pieces:
            piece = text = holder[name]
            if (waiting := self._waiting.pop(lane, None)) is not None:
                text = waiting[2] + text
            text = self._text_back(text, is_json=is_json)
            half = HALF_REFERENCE.search(text, max(len(text) - _MOST_HALF, 0))
            if half is not None and not _ends(fields):
                text = text[: half.start()]
                self._waiting[lane] = head, fields, half[0]
            holder[name] = text
            is_changed |= text != piece
        if not is_changed:
            return told + event
        return told + _written(head, self._back(fields))

    def _rest(self, fields: Mapping[str, Any] | None = None, but: set[_Lane] | None = None) -> bytes:
        """Events with what waits, where it is no reference: its text does not go on in this event, which has
        these fields. None: nothing follows."""
        if not self._waiting:
            return b""
        ends = {index for index, _ in _choices(fields or {})}
        written = list[bytes]()
        for lane in [*self._waiting]:
            if lane in (but or ()) or (ends and lane[0] not in ends):
                continue
            head, held_by, piece = self._waiting.pop(lane)
            for other, holder, name, _ in _pieces(held_by):
                holder[name] = piece if other == lane else ""
            for _, choice in _choices(held_by):
                for call in _calls(choice):  # clients add up what they get of a call
                    call.pop("id", None)
                    call["function"].pop("name", None)
            written.append(_written(head, held_by))
        return b"".join(written)


def _written(head: bytes, fields: Any) -> bytes:  # noqa: ANN401 - JSON
    return head + b"data: " + msgspec.json.encode(fields) + b"\n\n"


def _choices(fields: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The choices in a chunk of a chat, with their numbers."""
    choices = fields.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            yield _number(choice), choice


def _number(part: Mapping[str, Any]) -> int:
    index = part.get("index")
    return index if isinstance(index, int) else 0


def _ends(fields: Mapping[str, Any]) -> bool:
    """True if no piece of a text follows that this event has."""
    return any(choice.get("finish_reason") for _, choice in _choices(fields))


def _calls(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The tool calls in a choice."""
    delta = choice.get("delta")
    calls = delta.get("tool_calls") if isinstance(delta, dict) else None
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            yield call


def _pieces(fields: dict[str, Any]) -> Iterator[tuple[_Lane, dict[str, Any], str, bool]]:
    """The pieces of texts in an event: the text that it belongs to, what holds it, the name of its field, and
    whether the text is JSON."""
    for index, choice in _choices(fields):
        if isinstance(inner := choice.get("delta"), dict):
            yield from _named(inner, TEXTS, (index,))
            if isinstance(called := inner.get("function_call"), dict):  # as clients called tools before
                yield from _named(called, ("arguments",), (index, "function_call"))
            for call in _calls(choice):
                yield from _named(call["function"], ("arguments",), (index, _number(call)))
    delta, kind = fields.get("delta"), fields.get("type")
    if isinstance(delta, dict):
        yield from _named(delta, _PIECES, (None, _number(fields)))
    elif isinstance(delta, str):
        places = (fields.get(name) for name in ("type", "item_id", "content_index", "summary_index"))
        yield (None, *map(str, places)), fields, "delta", kind == _ARGUMENTS_PIECE


def _named(
    holder: dict[str, Any], names: tuple[str, ...], lane: _Lane
) -> Iterator[tuple[_Lane, dict[str, Any], str, bool]]:
    for name in names:
        if isinstance(holder.get(name), str):
            yield (*lane, name), holder, name, name in _JSON_TEXTS
