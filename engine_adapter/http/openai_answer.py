"""Asks the engine for usage and token ids that the client did not ask for, and removes them from the answer.

A stream reports usage only on request, in an extra chunk at the end. If kvpin asked for it, it removes that
chunk. With `return_token_ids`, the answer holds the prompt's token ids: each event with ids is read, and
written again without them. All other events pass unread, as the engine's own bytes.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Collection, Mapping

import msgspec

from engine_adapter.body import UNREADABLE, JsonBody
from engine_adapter.hold import AnswerReader, Hold
from engine_adapter.http.usage import read_answer_usage, read_usage
from engine_adapter.types import TokenIds

_ROUTES = ("/v1/chat/completions", "/v1/completions")
# The ends of an event. Engines use either; none ends lines with a carriage return alone.
_ENDS = (b"\n\n", b"\r\n\r\n")
_END = re.compile(rb"\n\r?\n")
# The mark of an event that is read. Text cannot contain it: quotes in JSON strings have a backslash. Some
# engines put `"usage": null` into every event.
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_USAGE_OR_IDS = re.compile(rb'"(?:usage"\s*:\s*\{|(?:prompt_)?token_ids")')
_NULL = msgspec.Raw(b"null")
_Fields = dict[str, msgspec.Raw]
# Fields that `return_token_ids` fills, in an answer and in each choice. Without it they are null.
_IN_ANSWER, _IN_CHOICE = ("prompt_token_ids",), ("prompt_token_ids", "token_ids")
_decode_fields = msgspec.json.Decoder(_Fields).decode
_decode_choices = msgspec.json.Decoder(list[_Fields]).decode
_decode_ids = msgspec.json.Decoder(list[int] | None).decode


def hold_openai(
    path: str,
    body: JsonBody,
    *,
    changes: Mapping[str, object] | None = None,
    drop: Collection[str] = (),
    ask_usage: bool = False,
    ask_tokens: bool = False,
    note: str = "",
) -> Hold:
    """The hold of a request for an engine that places requests itself.

    Args:
        path: the request's route.
        body: its body.
        changes: fields to set.
        drop: fields to remove.
        ask_usage: ask a stream for usage. The client sees it only if it asked for it.
        ask_tokens: ask for the prompt's token ids, for `Hold.answer.prompt_tokens()`. The client sees them
            only if it asked for them.
        note: what people should know about how the request is served.
    """
    fields: dict[str, object] = {**dict.fromkeys(drop), **(changes or {})}
    streams = body.get("stream") is True
    answers = path in _ROUTES
    options = _usage_options(body) if ask_usage and answers and streams else None
    if options is not None:
        fields["stream_options"] = options
    # With `echo`, an engine that returns ids leaves out the prompt's text.
    reads_tokens = ask_tokens and answers and not body.get("echo")
    hides_tokens = reads_tokens and body.get("return_token_ids") is not True
    if hides_tokens:
        fields["return_token_ids"] = True
    answer: AnswerReader | None = None
    if options is not None or reads_tokens:
        answer = OpenAIAnswer(
            streams=streams,
            hides_usage=options is not None,
            reads_tokens=reads_tokens,
            hides_tokens=hides_tokens,
        )
    return Hold(body.replace(**fields) if fields else body, answer=answer, note=note)


class OpenAIAnswer:
    """`AnswerReader` of chats and completions."""

    assembles = False

    def __init__(self, *, streams: bool, hides_usage: bool, reads_tokens: bool, hides_tokens: bool) -> None:
        """`streams`: the client asked for a stream."""
        self._streams = streams
        self._hides_usage = hides_usage
        self._reads_tokens = reads_tokens
        self._hides_tokens = hides_tokens
        self._held = bytearray()  # an incomplete event
        self._cached: int | None = None
        self._prompt: TokenIds[int] | None = None

    def feed(self, chunk: bytes) -> bytes:
        """See `AnswerReader.feed`."""
        if not self._streams:
            self._cached = read_answer_usage(chunk).cached_tokens
            return self._pass_json(chunk) if self._reads_tokens else chunk
        if not self._held and chunk.endswith(_ENDS):
            return self._pass_events(chunk)
        searched = max(len(self._held) - 3, 0)  # part of an end may have arrived before
        self._held += chunk
        end = max(at + len(mark) if (at := self._held.rfind(mark, searched)) >= 0 else 0 for mark in _ENDS)
        if not end:
            return b""
        whole = bytes(self._held[:end])
        del self._held[:end]
        return self._pass_events(whole)

    def finish(self) -> bytes:
        """See `AnswerReader.finish`."""
        rest = bytes(self._held)
        self._held.clear()
        return self._pass_events(rest) if rest else b""

    def cached_tokens(self) -> int | None:
        """See `AnswerReader.cached_tokens`."""
        return self._cached

    def prompt_tokens(self) -> TokenIds[int] | None:
        """See `AnswerReader.prompt_tokens`."""
        return self._prompt

    def _pass_events(self, events: bytes) -> bytes:
        """The client's part of whole events."""
        wants_tokens = self._hides_tokens or (self._reads_tokens and self._prompt is None)
        return pass_marked(events, _USAGE_OR_IDS if wants_tokens else _USAGE, self._pass_event)

    def _pass_event(self, event: bytes) -> bytes:
        """The client's part of an event with usage or token ids."""
        read = _read_event(event)
        if read is None:
            return event
        answer, choices = read
        usage = bytes(answer.get("usage", _NULL))
        if usage.startswith(b"{"):
            cached = read_usage(usage).cached_tokens
            self._cached = cached if cached is not None else self._cached
            if self._hides_usage and not choices:
                return b""
        if self._reads_tokens:
            self._read_prompt(answer, choices)
        if not self._hides_tokens or not choices:
            return event
        return b"" if all(map(_says_nothing, choices)) else _rewritten(event, answer, choices)

    def _pass_json(self, content: bytes) -> bytes:
        read = _read_event(content)
        if read is None:
            return content
        self._read_prompt(*read)
        return _without_tokens(*read) if self._hides_tokens else content

    def _read_prompt(self, answer: _Fields, choices: list[_Fields]) -> None:
        """Reads the prompt's token ids: chats have them beside their choices, completions in each choice."""
        for fields in (answer, *choices):
            if self._prompt is None and "prompt_token_ids" in fields:
                self._prompt = _token_ids(fields["prompt_token_ids"])


def _usage_options(body: JsonBody) -> dict[str, object] | None:
    """The request's stream options with usage added; None if its client asked for usage itself."""
    options = body.get("stream_options")
    if options is None:
        options = {}
    if not isinstance(options, dict) or options.get("include_usage"):
        return None
    # Without usage this option has no effect; with usage it would add it to every chunk.
    return {name: options[name] for name in options if name != "continuous_usage_stats"} | {
        "include_usage": True
    }


def pass_marked(events: bytes, mark: re.Pattern[bytes], pass_event: Callable[[bytes], bytes]) -> bytes:
    """The client's part of whole events: that of an event with the mark comes from `pass_event`, all other
    events pass as they are."""
    parts, done = [], 0
    while found := mark.search(events, done):
        begins = [at + len(end) for end in _ENDS if (at := events.rfind(end, done, found.start())) >= 0]
        begin, end = max(begins, default=done), _END.search(events, found.end())
        parts.append(events[done:begin])
        done = len(events) if end is None else end.end()
        parts.append(pass_event(events[begin:done]))
    return b"".join([*parts, events[done:]]) if parts else events


def _read_event(event: bytes) -> tuple[_Fields, list[_Fields]] | None:
    """Fields and choices of a chunk or a whole answer; None for anything else."""
    try:
        answer = _decode_fields(event[event.find(b"{") : event.rfind(b"}") + 1])
        return answer, _decode_choices(answer["choices"])
    except (*UNREADABLE, KeyError):
        return None


def _rewritten(event: bytes, answer: _Fields, choices: list[_Fields]) -> bytes:
    """The event without token ids."""
    return event[: event.find(b"{")] + _without_tokens(answer, choices) + event[event.rfind(b"}") + 1 :]


def _token_ids(raw: msgspec.Raw) -> TokenIds[int] | None:
    try:
        ids = _decode_ids(raw)
        return None if ids is None else array("i", ids)
    except (*UNREADABLE, OverflowError):
        return None


def _says_nothing(choice: _Fields) -> bool:
    """Whether a chunk of a chat holds nothing but token ids."""
    silent = all(choice.get(name, _NULL) == _NULL for name in ("finish_reason", "logprobs"))
    return silent and choice.get("delta") == msgspec.Raw(b"{}")


def _without_tokens(answer: _Fields, choices: list[_Fields]) -> bytes:
    """The answer with null in place of token ids. Every other value keeps its bytes."""
    for names, fields in ((_IN_ANSWER, answer), *((_IN_CHOICE, choice) for choice in choices)):
        for name in names:
            if name in fields:
                fields[name] = _NULL
    return msgspec.json.encode({**answer, "choices": choices})
