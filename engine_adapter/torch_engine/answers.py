"""Answers, from the engine's tokens to OpenAI's shapes: chats and completions, whole or streamed.

A `ChoiceReader` makes pieces of the tokens of one choice, an `AnswerWriter` writes the pieces of all of them.
"""

from __future__ import annotations

import codecs
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
from typing_extensions import override

from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.torch_engine.requests import Finished, Output, PromptScores, Token
from engine_adapter.torch_engine.tool_calls import CallPart, CallReader, Found, held_back
from engine_adapter.types import TokenIds

# --- from tokens to text, piece by piece, and to stop strings -------------------------------------------


_UNFINISHED = "\ufffd"  # how a tokenizer shows bytes that are not yet a whole character
# A character has at most four bytes, and so at most four tokens.
_MOST_TOKENS = 4
_OF_PROMPT = 6  # ids of the prompt's end on which the text of the first token depends


class Detokenizer:
    """The text of one answer, token by token.

    The text of a token depends on its neighbours (spaces, characters of several tokens). So each token
    decodes a short window again, and the text the window had before is cut off. Bytes of an unfinished
    character are held back until the character is whole, or cannot become so any more. Text that may begin a
    stop string is held back until that is decided. Once one is found [`stopped`], it and everything after it
    are left out.
    """

    __slots__ = (
        "_held", "_ids", "_left_to_min", "_read", "_shown", "_size", "_skipped", "_stops", "_tokenizer",
        "_window", "stopped",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        stops: Sequence[str] = (),
        *,
        skipped: frozenset[int] = frozenset(),
        after: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """`skipped`: the ids of special tokens, if these have no text. `after`: the prompt. `min_tokens`: no
        stop string ends within so many tokens."""
        self._tokenizer = tokenizer
        self._size = tokenizer.vocab_size
        self._skipped = skipped
        self._stops = tuple(stops)
        self._left_to_min = min_tokens
        self._ids = [token_id for token_id in after[-_OF_PROMPT:] if self._has_text(token_id)]
        self._window = 0  # first id of the window
        self._shown = self._decode(0) if self._ids else ""  # text of window..read
        if self._shown.endswith(_UNFINISHED):
            self._ids, self._shown = [], ""
        self._read = len(self._ids)  # the text of the ids before it has been returned
        self._held = ""  # text that may yet be the start of a stop string
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that is certain once this token is known: often "", never part of a stop string."""
        self._left_to_min -= 1
        if not self._has_text(token_id):
            return ""  # without text, many of them would make the window long
        self._ids.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_UNFINISHED):
            return self._release(self._before_unfinished(text))
        if len(text) <= len(self._shown):
            return ""
        new = text[len(self._shown) :]
        self._window, self._read = self._read, len(self._ids)  # the window has the tokens of the last piece
        self._shown = self._decode(self._window)
        return self._release(new)

    def finish(self) -> str:
        """The text held back, after the last token."""
        if self.stopped:
            return ""
        text = self._decode(self._window)
        held = self._release(text[len(self._shown) :]) + self._held
        self._held, self._shown = "", text
        return held

    def _has_text(self, token_id: int) -> bool:
        return token_id < self._size and token_id not in self._skipped

    def _decode(self, start: int, end: int | None = None) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=bool(self._skipped))

    def _before_unfinished(self, text: str) -> str:
        """Moves the window to the last tokens, of which one begins a character; returns the new text before
        that one. "" as long as few tokens are held back, or none of them begins a character."""
        if len(self._ids) - self._read < 2 * _MOST_TOKENS:
            return ""
        after = self._decode(self._read)
        for cut in range(len(self._ids) - _MOST_TOKENS, len(self._ids) - 2 * _MOST_TOKENS, -1):
            known = self._decode(self._window, cut)
            shown = self._decode(self._read, cut)
            if text.startswith(known) and after == shown + text[len(known) :]:
                new = known[len(self._shown) :]
                self._window, self._read, self._shown = self._read, cut, shown
                return new
        return ""

    def _release(self, new: str) -> str:
        """The text up to a stop string, or up to where one may begin."""
        if not self._stops or self.stopped:
            return "" if self.stopped else new
        text = self._held + new
        found = [at for at in map(text.find, self._stops) if at >= 0]
        if found and self._left_to_min < 0:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max(held_back(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"  # how SentencePiece writes a space


class TokenBytes:
    """The bytes of each token of a vocabulary, as it stands inside a text."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        backend: Any = tokenizer.transformers
        decoder = getattr(getattr(backend, "backend_tokenizer", None), "decoder", None)
        state: bytes = decoder.__getstate__() if decoder is not None else b""
        self._is_byte_level = b'"ByteLevel"' in state
        self._is_sentencepiece = _SPACE.encode() in state or b'"Metaspace"' in state
        self._added = frozenset(backend.added_tokens_decoder)

    def of(self, token_id: int) -> bytes:
        """A token's bytes; none for an id outside the vocabulary."""
        if not 0 <= token_id < self._tokenizer.vocab_size:
            return b""
        if token_id not in self._added:
            name: str | None = self._tokenizer.transformers.convert_ids_to_tokens(token_id)
            if name is None:
                return b""
            if self._is_byte_level:
                with suppress(KeyError):  # another kind of token
                    return bytes(map(_byte_alphabet().__getitem__, name))
            if self._is_sentencepiece:
                byte = _BYTE.fullmatch(name)
                return bytes.fromhex(byte[1]) if byte else name.replace(_SPACE, " ").encode()
        return self._tokenizer.decode([token_id]).encode()


class TextOffsets:
    """Where tokens begin in a text, in characters. A token inside a character begins where that does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def next(self, token: bytes) -> int:
        """The offset of the next token."""
        offset = self._offset
        self._offset += len(self._decoder.decode(token))
        return offset


def shown(token: bytes) -> str:
    r"""A token as text. Bytes that are no character alone are written as OpenAI does: `\xf0\x9f`."""
    return token.decode("utf-8", "backslashreplace")


@cache
def _byte_alphabet() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # noqa: PLC0415 - slow to import

    table: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    return {character: byte for byte, character in table.items()}


_LOWEST_LOGPROB = -9999.0  # JSON has no infinity
END_OF_STREAM = b"data: [DONE]\n\n"
_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Piece:
    """A part of one choice: new text and parts of tool calls, and the tokens they came from."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    calls: list[CallPart] = field(default_factory=list)
    echoed: list[Token] = field(default_factory=list)  # of the prompt, before `tokens`
    finish_reason: str | None = None  # set in the last piece

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.calls or self.echoed or self.finish_reason)

    def add(self, more: Piece) -> None:
        """Appends the piece that follows."""
        self.text += more.text
        self.tokens += more.tokens
        self.calls += more.calls
        self.echoed += more.echoed
        self.finish_reason = more.finish_reason


@dataclass(slots=True)
class Echo:
    """The prompt, which stands before each choice of a completion with `echo`."""

    text: str
    unscored: TokenIds[int] | None = None  # while logprobs are awaited
    tokens: list[Token] = field(default_factory=list)  # with their logprobs

    def score(self, found: PromptScores) -> None:
        """Takes the logprobs. The first token has none."""
        scores = [(None, None), *found.scores]
        self.tokens = [Token(i, *score) for i, score in zip(self.unscored or (), scores, strict=True)]
        self.unscored = None


@dataclass
class ChoiceReader:
    """One choice while it is generated."""

    detokenizer: Detokenizer
    end_tokens: frozenset[int]
    answered: Sequence[int] = ()  # the answer's tokens before it: new text depends on them
    calls: CallReader | None = None
    echo: Echo | None = None
    drops: bool = False  # the client wants no token of it
    completion_tokens: int = field(default=0, init=False)
    finish_reason: str | None = field(default=None, init=False)  # until it has ended
    _new: Piece = field(init=False)

    def __post_init__(self) -> None:
        self._new = Piece("" if self.echo is None else self.echo.text)
        for token_id in self.answered:
            self._read(self.detokenizer.push(token_id))

    def accept(self, outputs: list[Output]) -> None:
        """Reads what the engine made. Nothing counts after the end."""
        for output in outputs:
            if self.finish_reason is not None:
                return
            if isinstance(output, PromptScores):
                if self.echo is not None:
                    self.echo.score(output)
            elif isinstance(output, Token) and not self.drops:
                self._accept_token(output)
            elif isinstance(output, Finished):
                self._end("length" if self.drops else output.reason)

    def take(self) -> Piece:
        """Text and tokens since the last call; nothing until the echo is complete."""
        if self.echo is not None:
            if self.echo.unscored is not None:
                return Piece()
            self._new.echoed, self.echo = self.echo.tokens, None
        new, self._new = self._new, Piece()
        return new

    def _accept_token(self, token: Token) -> None:
        self.completion_tokens += 1
        self._new.tokens.append(token)
        if token.token_id not in self.end_tokens:
            self._add(self._read(self.detokenizer.push(token.token_id)))
        if self.detokenizer.stopped:
            self._end("stop")

    def _end(self, reason: str) -> None:
        self._add(self._read(self.detokenizer.finish()))
        reason = "stop" if self.detokenizer.stopped else reason
        if self.calls is not None:
            self._add(self.calls.finish())
            if reason == "stop" and self.calls.ends_as is not None:
                reason = self.calls.ends_as
        self.finish_reason = self._new.finish_reason = reason

    def _read(self, text: str) -> Found:
        return Found(text) if self.calls is None else self.calls.push(text)

    def _add(self, found: Found) -> None:
        self._new.text += found.text
        self._new.calls += found.calls


@dataclass(kw_only=True)
class AnswerWriter:
    """Writes the answer to a chat, whole or as server-sent events."""

    id_prefix: ClassVar[str] = "chatcmpl-"
    kind: ClassVar[str] = "chat.completion"
    kind_of_chunk: ClassVar[str] = "chat.completion.chunk"
    first: ClassVar[Mapping[str, Any] | None] = MappingProxyType(
        {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
    )

    token_bytes: TokenBytes
    model: str
    choices: int = 1  # how many the answer has
    with_logprobs: bool = False
    # Returned with the answer; None when the client did not ask.
    prompt_token_ids: Sequence[int] | None = None
    include_usage: bool = False
    tells_tokens: bool = False  # whether a comment before each event of a stream holds the ids of its tokens
    # The tokens before it, of an answer that began before: a stream has no opening then.
    answered: Sequence[int] = ()
    silent: frozenset[int] = frozenset()  # ids that have no text in the answer
    _untold: list[Token] = field(default_factory=list, init=False)  # generated since the last event
    _plain_ends: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, init=False)
    _head: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self._head = {
            "id": self.id_prefix + secrets.token_hex(12),
            "object": self.kind_of_chunk,
            "created": int(time.time()),
            "model": self.model,
        }
        ids = self.prompt_token_ids
        self._prompt_ids = {} if ids is None else {"prompt_token_ids": ids}

    def body(self, piece: Piece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """The own fields of a choice in a whole answer."""
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.calls:
            message["content"] = piece.text or None
            message["tool_calls"] = _whole_calls(piece.calls)
        return {"message": message, "logprobs": logprobs}

    def delta(self, piece: Piece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """The own fields of a choice in a chunk."""
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.calls:
            delta["tool_calls"] = [call.as_delta() for call in piece.calls]
        return {"delta": delta, "logprobs": logprobs}

    def logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:  # noqa: ARG002 - see below
        """Log probabilities of `tokens`, the next ones of a choice."""
        content = [
            self._entry(token.token_id, token.logprob)
            | {"top_logprobs": [self._entry(*best) for best in token.top_logprobs or ()]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        content = self.token_bytes.of(token_id)
        return {"token": shown(content), "logprob": _finite(logprob), "bytes": list(content)}

    def whole(self, choices: Sequence[Piece], usage: dict[str, Any]) -> bytes:
        """The answer as one JSON object."""
        answer = {
            **self._head,
            "object": self.kind,
            "choices": [
                self._choice(index, self.body(piece, self._logprobs(index, piece)), piece)
                for index, piece in enumerate(choices)
            ],
            "usage": usage,
        }
        return _json(answer | self._prompt_ids)

    def opening(self) -> bytes:
        """The first chunks of a stream: a chat's role, the prompt's token ids; empty if there is neither."""
        if self.answered or (self.first is None and self.prompt_token_ids is None):
            return b""
        fields = dict(self.first or self.delta(Piece(), None))
        return b"".join(
            self._chunk(index, fields, Piece(), self._prompt_ids) for index in range(self.choices)
        )

    def piece(self, index: int, piece: Piece) -> bytes:
        """A chunk of a choice; empty for a piece that shows the client nothing."""
        if self.tells_tokens and piece.finish_reason is None:
            self._untold += piece.tokens
        if piece.finish_reason is not None:
            return self._full_piece(index, piece)
        if self.with_logprobs or self.prompt_token_ids is not None or piece.calls:
            return self._told() + self._full_piece(index, piece) if piece else b""
        if not piece.text:
            return b""
        if index not in self._plain_ends:  # the bytes around the text are the same for every token
            marker = secrets.token_hex(16)
            before, _, after = self._full_piece(index, Piece(marker)).partition(_json(marker))
            self._plain_ends[index] = before, after
        before, after = self._plain_ends[index]
        return self._told() + before + _json(piece.text) + after

    def end(self, usage: dict[str, Any]) -> bytes:
        """The usage if asked for, and the end mark."""
        end = event_of({**self._head, "choices": [], "usage": usage}) if self.include_usage else b""
        return end + END_OF_STREAM

    def _choice(self, index: int, fields: dict[str, Any], piece: Piece) -> dict[str, Any]:
        choice = {"index": index, **fields, "finish_reason": piece.finish_reason}
        if self.prompt_token_ids is not None:
            choice["token_ids"] = [token.token_id for token in piece.tokens]
        return choice

    def _told(self) -> bytes:
        """The comment before an event."""
        if not self._untold:
            return b""
        told, self._untold = self._untold, []
        return f": {' '.join(str(token.token_id) for token in told)}\n".encode()

    def _full_piece(self, index: int, piece: Piece) -> bytes:
        return self._chunk(index, self.delta(piece, self._logprobs(index, piece)), piece, {})

    def _chunk(self, index: int, fields: dict[str, Any], piece: Piece, extra: Mapping[str, Any]) -> bytes:
        usage = {"usage": None} if self.include_usage else {}
        return event_of({**self._head, "choices": [self._choice(index, fields, piece)], **usage, **extra})

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any] | None:
        tokens = piece.echoed + piece.tokens
        return self.logprobs(index, tokens) if self.with_logprobs and tokens else None


@dataclass(kw_only=True)
class CompletionWriter(AnswerWriter):
    """Writes the answer to a completion."""

    id_prefix = "cmpl-"
    kind = kind_of_chunk = "text_completion"
    first = None

    _offsets: dict[int, TextOffsets] = field(default_factory=dict, init=False)

    @override
    def body(self, piece: Piece, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"text": piece.text, "logprobs": logprobs}

    delta = body

    @override
    def logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        if (offsets := self._offsets.get(index)) is None:
            offsets = self._offsets[index] = TextOffsets()
            for token_id in self.answered:
                offsets.next(self._text_of(token_id))
        contents = [self.token_bytes.of(token.token_id) for token in tokens]
        return {
            "tokens": [shown(content) for content in contents],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._best(token) for token in tokens],
            "text_offset": [offsets.next(self._text_of(token.token_id)) for token in tokens],
        }

    def _text_of(self, token_id: int) -> bytes:
        return b"" if token_id in self.silent else self.token_bytes.of(token_id)

    def _best(self, token: Token) -> dict[str, Any] | None:
        """The best tokens and the chosen one; None for the first token of a prompt."""
        if token.logprob is None:
            return None
        best = {shown(self.token_bytes.of(i)): _finite(logprob) for i, logprob in token.top_logprobs or ()}
        return best | {shown(self.token_bytes.of(token.token_id)): _finite(token.logprob)}


def _whole_calls(parts: Sequence[CallPart]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for part in parts:
        if part.call_id is not None:
            function = {"name": part.name, "arguments": ""}
            calls.append({"id": part.call_id, "type": "function", "function": function})
        calls[part.index]["function"]["arguments"] += part.arguments
    return calls


def event_of(content: object) -> bytes:
    """`content` as an event of a stream."""
    return b"data: " + _json(content) + b"\n\n"


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LOWEST_LOGPROB)
