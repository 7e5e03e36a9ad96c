"""What an answer leaves in its slot: which of the sampled tokens are certain, and how many are not.

A slot holds (prompt + sampled)[: n_prompt + n_predicted − 1] after an answer, as the last token is never
decoded. The server tells the counts and, on its OpenAI routes, no ids. They are read from the text: a
stream has one chunk per sampled token, except that text is held back while it ends inside a UTF-8
character or may be the start of a stop string, and that tokens without text have no chunk in a chat.
The counts show whether that happened. An id is taken only where they prove it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import msgspec

from engine_adapter.errors import EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.http.error_bodies import read_error
from engine_adapter.types import TokenIds

DONE = b"[DONE]"
"""The last payload of most streams."""
# What a text is tokenised behind where a vocabulary would put a space before its first word.
_ANCHOR = "\n"
# Stands for bytes that are no text: what they were is not seen.
_NO_TEXT = "\ufffd"
_INSIDE_A_CHARACTER = range(0x80, 0xC0)  # what UTF-8 bytes after the first one are


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said, and what it said of it. Counts are in tokens, times in ms, None where unknown.

    Attributes:
        prompt_tokens: of the prompt, reused ones included.
        cached_tokens: of these, the ones whose KV was reused.
        predicted_tokens: sampled ones, the end of a turn included.
        prompt_ms: time the new tokens of the prompt took.
        predicted_ms: time the sampled tokens took.
        pieces: the text of each chunk in order; empty ones only where the route sends them.
        is_plain: the pieces are one choice and all the text there was, as far as the stream shows.
        finish_reason: as the route gives it.
        error: the message of an error that ended the stream.
        is_complete: the end was seen.
        counts_silent: tokens without text have a chunk as well, as on /v1/completions.
        choices: how many there were; the counts are those of the first.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    predicted_tokens: int | None = None
    prompt_ms: float | None = None
    predicted_ms: float | None = None
    pieces: tuple[str, ...] = ()
    is_plain: bool = False
    finish_reason: str | None = None
    error: str | None = None
    is_complete: bool = False
    counts_silent: bool = False
    choices: int = 1


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None


class _Timings(msgspec.Struct):
    cache_n: int | None = None
    prompt_n: int | None = None
    prompt_ms: float | None = None
    predicted_n: int | None = None
    predicted_ms: float | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Response(msgspec.Struct):
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    """One chunk of any route, or a whole answer."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None
    prompt_progress: Any = None
    type: str | None = None  # /v1/responses, with the two below
    delta: str | None = None
    response: _Response | None = None
    content: str | None = None  # /completion, with the two below
    index: int = 0
    stop_type: str | None = None


_decode = msgspec.json.Decoder(_Event).decode


def stream_payloads(raw: bytes) -> Iterator[bytes]:
    """The `data:` lines of a stream in order, `[DONE]` among them; a line cut short is not one."""
    lines = raw.split(b"\n")
    lines.pop()
    payloads = (line[5:].strip() for line in lines if line.startswith(b"data:"))
    # A request with several prompts has one before each prompt but the first.
    return (payload for payload in payloads if payload != b"null")


def read_answer(raw: bytes, *, streamed: bool) -> Answer:
    """Reads the bytes of an answer of any route; what cannot be read makes it not plain, and is no error.

    A JSON answer has counts and no pieces: its text does not show where its tokens end.
    """
    reader = _Reader()
    for payload in stream_payloads(raw) if streamed else (raw,):
        reader.read(payload)
    return reader.answer(streamed=streamed)


class _Reader:
    """Takes an answer in, event by event."""

    __slots__ = (
        *("choices", "complete", "error", "finish", "index"),
        *("odd", "pieces", "silent", "timings", "usage"),
    )

    def __init__(self) -> None:
        self.choices, self.index = 1, 0
        self.complete = self.odd = self.silent = False
        self.error: str | None = None
        self.finish: str | None = None
        self.pieces: list[str] = []
        self.timings = _Timings()
        self.usage = _Usage()

    def read(self, payload: bytes) -> None:
        if payload == DONE:
            self.complete = True
            return
        try:
            event = _decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.odd = True
            return
        if event.error is not None:
            self.error = read_error(payload).message
        if event.prompt_progress is None:  # sent before the first token, with no text or none of its own
            self._read_text(event)
        self._read_counts(event)

    def _read_text(self, event: _Event) -> None:
        if event.choices is not None:
            for choice in event.choices:
                self._read_choice(choice)
        elif event.type is not None:
            self._read_response_event(event)
        elif event.content is not None:
            self._read_native(event, event.content)

    def _read_choice(self, choice: _Choice) -> None:
        self.index = choice.index
        self.choices = max(self.choices, choice.index + 1)
        if choice.index:
            return
        if choice.finish_reason is not None:
            self._finish(choice.finish_reason)
        delta = choice.delta
        if delta is not None:
            # Reasoning stands between tags that are left out, and spaces next to them may be as well.
            if delta.reasoning_content is not None or delta.tool_calls is not None:
                self.odd = True
            if text := (delta.reasoning_content or "") + (delta.content or ""):
                self.pieces.append(text)
        elif choice.text is not None:
            self._read_silent(choice.text)

    def _read_native(self, event: _Event, text: str) -> None:
        self.index = event.index
        self.choices = max(self.choices, event.index + 1)
        if event.index:
            return
        if event.stop_type is not None:
            self._finish("length" if event.stop_type == "limit" else "stop")
        self._read_silent(text)

    def _read_silent(self, text: str) -> None:
        """The text of a route that has a chunk for each token, and one more for the end."""
        self.silent = True
        if text or not self.complete:
            self.pieces.append(text)

    def _read_response_event(self, event: _Event) -> None:
        match event.type:
            case "response.output_text.delta" if event.delta is not None:
                self.pieces.append(event.delta)
            case "response.reasoning_text.delta" | "response.function_call_arguments.delta":
                self.pieces.append(event.delta or "")
                self.odd = True
            case "response.completed":
                self.complete = True

    def _finish(self, reason: str) -> None:
        self.finish, self.complete = reason, True

    def _read_counts(self, event: _Event) -> None:
        # Choices end in any order. A chunk of counts alone follows the end of the choice they are of.
        if self.index:
            return
        if event.usage is not None:
            self.usage = event.usage
        elif event.response is not None and event.response.usage is not None:
            self.usage = event.response.usage
        if event.timings is not None:
            self.timings = event.timings

    def answer(self, *, streamed: bool) -> Answer:
        usage, timings = self.usage, self.timings
        details = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
        return Answer(
            prompt_tokens=_first(
                usage.prompt_tokens, usage.input_tokens, _sum(timings.cache_n, timings.prompt_n)
            ),
            cached_tokens=_first(details.cached_tokens, timings.cache_n),
            predicted_tokens=_first(usage.completion_tokens, usage.output_tokens, timings.predicted_n),
            prompt_ms=timings.prompt_ms,
            predicted_ms=timings.predicted_ms,
            pieces=tuple(self.pieces) if streamed else (),
            is_plain=streamed and not self.odd and self.choices == 1,
            finish_reason=self.finish,
            error=self.error,
            is_complete=self.complete or not (streamed or self.odd or self.error),
            counts_silent=self.silent,
            choices=self.choices,
        )


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second


def known_tokens(
    answer: Answer, tokenised: Sequence[tuple[int, bytes]], *, has_stop: bool, may_trim: bool = False
) -> TokenIds[int]:
    """The leading sampled tokens whose ids are certain, at most one for each of `tokenised`.

    Nothing is certain of an answer that is not plain, or that ended without counts.

    Args:
        answer: a streamed one.
        tokenised: ids and bytes of the tokens the server makes of all pieces together.
        has_stop: the request had stop strings, so that text may have been held back or left out.
        may_trim: white space the answer began with may have been left out, and the first token may have
            been one with it. So it is in a chat with tools or a response format, or whose template knows
            reasoning.
    """
    if not answer.is_plain or answer.predicted_tokens is None:
        return array("i")
    if may_trim and not answer.counts_silent and not "".join(answer.pieces)[:1].isspace():
        return array("i")
    missing = answer.predicted_tokens - len(answer.pieces)
    # The end of a turn is sampled and has no text. So has a stop string, of any number of tokens.
    ended = answer.finish_reason == "stop" and not answer.counts_silent
    if missing == 0 or (missing == 1 and ended and not has_stop):
        return _one_each(answer.pieces, tokenised)
    if missing == 1 and answer.finish_reason is None and not has_stop:
        # The end of a turn, most likely; or else a character of two tokens, and all before it is certain.
        return _one_each(takewhile(str.isascii, answer.pieces), tokenised)
    if len(tokenised) == answer.predicted_tokens - ended and not (ended and has_stop):
        return _some_each(answer.pieces, tokenised, has_stop=has_stop)
    return array("i")


def _one_each(pieces: Iterable[str], tokenised: Sequence[tuple[int, bytes]]) -> TokenIds[int]:
    """Ids as far as each piece is the next token."""
    known: TokenIds[int] = array("i")
    for piece, (token, text) in zip(pieces, tokenised, strict=False):
        if piece.encode() != text or _NO_TEXT in piece:
            break
        known.append(token)
    return known


def _some_each(
    pieces: Iterable[str], tokenised: Sequence[tuple[int, bytes]], *, has_stop: bool
) -> TokenIds[int]:
    """All ids if each piece is the next few tokens, held back as a server would; otherwise none."""
    tokens = iter(tokenised)
    for piece in pieces:
        rest = piece.encode()
        while rest:
            _, text = next(tokens, (0, b""))
            if not text or not rest.startswith(text) or _NO_TEXT in piece:
                return array("i")
            rest = rest[len(text) :]
            if rest and rest[0] not in _INSIDE_A_CHARACTER and not has_stop:
                return array("i")
    return array("i", [token for token, _ in tokenised])


async def generated_tokens(
    control: ControlClient, answer: Answer, *, has_stop: bool, may_trim: bool = False
) -> TokenIds[int]:
    """The leading sampled tokens whose ids are certain, by asking the server to tokenise the text.

    `has_stop` and `may_trim` are those of `known_tokens`.

    Raises:
        EngineUnavailable: the server cannot be reached, or tells no pieces.
        EngineRejected: it refuses the text.
    """
    text = "".join(answer.pieces)
    if not text or not answer.is_plain or answer.predicted_tokens is None:
        return array("i")
    tokenised = await _tokenise(control, text)
    if b"".join(piece for _, piece in tokenised) == b" " + text.encode():
        # The space that this vocabulary puts before a text: behind an anchor the text has none.
        tokenised = _after(b" " + _ANCHOR.encode(), await _tokenise(control, _ANCHOR + text))
    return known_tokens(answer, tokenised, has_stop=has_stop, may_trim=may_trim)


class _Token(msgspec.Struct):
    id: int
    piece: str | list[int]


class _Tokenised(msgspec.Struct):
    tokens: list[_Token]


async def _tokenise(control: ControlClient, text: str) -> list[tuple[int, bytes]]:
    request = {"content": text, "add_special": False, "parse_special": True, "with_pieces": True}
    try:
        answered = msgspec.convert(await control.call("POST", "/tokenize", json=request), _Tokenised)
    except msgspec.ValidationError as error:
        raise EngineUnavailable(f"POST /tokenize: the answer has no tokens with pieces: {error}") from error
    # Bytes that are no text come as a list of numbers.
    return [
        (token.id, token.piece.encode() if isinstance(token.piece, str) else bytes(token.piece))
        for token in answered.tokens
    ]


def _after(prefix: bytes, tokenised: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """The tokens behind `prefix`, none when no token ends where it does."""
    for count in range(1, len(prefix) + 1):
        if b"".join(text for _, text in tokenised[:count]) == prefix:
            return tokenised[count:]
    return []


def slot_content(
    prompt: TokenIds[int], answer: Answer, generated: TokenIds[int]
) -> tuple[TokenIds[int], int]:
    """What the slot holds now: its leading tokens as far as they are known, and how many more there are.

    A stream that broke off leaves at least that much. Several choices lie in several slots: of them, of
    a prompt that the server counts otherwise, and after an error, nothing is known.
    """
    nothing: TokenIds[int] = array("i")
    n_prompt = len(prompt) if answer.prompt_tokens is None else answer.prompt_tokens
    length = n_prompt + max((answer.predicted_tokens or 0) - 1, 0)
    began = answer.predicted_tokens is not None or answer.pieces
    if n_prompt != len(prompt) or answer.choices > 1 or answer.error or not began:
        return nothing, length if began else 0
    known = (prompt + generated)[:length]
    return known, length - len(known)
