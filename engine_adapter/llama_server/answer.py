"""Reads an answer: its counts and times, and the tokens that it left in its slot.

After an answer a slot holds (prompt + sampled)[: n_prompt + n_sampled - 1]: the last token is never decoded.
The server tells the counts. Its own completion routes also tell the ids of the sampled tokens. Its OpenAI
routes do not, but their streams usually have one chunk per token. Where the counts prove that, the ids are
those of the answer's text, as far as each token has the text of its chunk. All other ids are unknown until
the slot is saved: the header of the file has them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine_adapter.body import UNREADABLE
from engine_adapter.http.answer_fields import read_error
from engine_adapter.http.control import ControlClient
from engine_adapter.types import TokenIds

DONE = b"[DONE]"
"""The last payload of most streams."""
_NO_TEXT = "\ufffd"  # stands for bytes that are no text: which bytes, is not shown


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Timings(msgspec.Struct):
    """The server's own counts, which some streams have without any usage."""

    cache_n: int | None = None
    prompt_n: int | None = None
    predicted_n: int | None = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_CallDelta] | None = None


class _Logprobs(msgspec.Struct):
    content: list[Any] | None = None


class ChoiceChunk(msgspec.Struct):
    """One choice in a chunk of a stream."""

    index: int = 0
    text: str | None = None
    delta: _Delta = msgspec.field(default_factory=_Delta)
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class StreamChunk(msgspec.Struct):
    """One chunk of a stream. The fields after `prompt_progress` are those of the server's own completions,
    which also answer without a stream."""

    choices: list[ChoiceChunk] = []
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None
    prompt_progress: Any = None
    tokens: list[int] | None = None
    stop: bool = False
    truncated: bool = False
    tokens_evaluated: int | None = None
    tokens_predicted: int | None = None


decode_chunk = msgspec.json.Decoder(StreamChunk).decode


@dataclass(slots=True)
class CompletionOutput:
    """The content of an answer. Counts are in tokens, None where the server did not tell them.

    Attributes:
        pieces: the text of each chunk that has some, in order.
        is_plain: the pieces are all the text there was: no reasoning, no tool call, no second choice.
        error: the message of an error that ended the stream.
        token_ids: the leading sampled tokens, if the server reports token ids; else None.
    """

    pieces: list[str] = field(default_factory=list)
    is_plain: bool = True
    is_complete: bool = False
    finish_reason: str | None = None
    error: str | None = None
    usage: _Usage = field(default_factory=_Usage)
    timings: _Timings = field(default_factory=_Timings)
    token_ids: TokenIds[int] | None = None

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt, reused ones included."""
        cached, computed = self.timings.cache_n, self.timings.prompt_n
        total = cached + computed if cached is not None and computed is not None else None
        return total if self.usage.prompt_tokens is None else self.usage.prompt_tokens

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt whose KV was reused."""
        details = self.usage.prompt_tokens_details
        cached = None if details is None else details.cached_tokens
        return self.timings.cache_n if cached is None else cached

    @property
    def sampled_tokens(self) -> int | None:
        """Tokens that were sampled, the end of a turn included."""
        sampled = self.usage.completion_tokens
        return self.timings.predicted_n if sampled is None else sampled

    @property
    def has_chunk_per_token(self) -> bool:
        """True if the counts prove that each sampled token has its own chunk.

        The end of a turn has no text. Another token without text, or one whose text was held back because it
        ends inside a character, makes the pieces fewer than the tokens.
        """
        ended = self.finish_reason == "stop"
        return self.is_plain and bool(self.pieces) and len(self.pieces) + ended == self.sampled_tokens

    def read(self, payload: bytes) -> None:
        """Reads one event. An unreadable event is no error, but the answer is then not plain."""
        if payload == DONE:
            self.is_complete = True
            return
        try:
            event = decode_chunk(payload)
        except UNREADABLE:
            self.is_plain = False
            return
        if event.error is not None:
            self.error = read_error(payload).message
        if event.prompt_progress is None:  # sent before the first token
            for choice in event.choices:
                self._read_choice(choice)
            if event.tokens is not None:
                self._read_native_event(event, event.tokens)
        self.usage = event.usage or self.usage
        self.timings = event.timings or self.timings

    def _read_choice(self, choice: ChoiceChunk) -> None:
        delta = choice.delta
        # Reasoning stands between tags that are left out, and spaces next to them may be as well.
        if choice.index or delta.reasoning_content is not None or delta.tool_calls is not None:
            self.is_plain = False
        if text := (delta.reasoning_content or "") + (delta.content or "") + (choice.text or ""):
            self.pieces.append(text)
        if choice.finish_reason is not None:
            self.finish_reason, self.is_complete = choice.finish_reason, True

    def _read_native_event(self, event: StreamChunk, tokens: list[int]) -> None:
        """A chunk of one of the server's own completions, or the whole answer."""
        known = array("i") if self.token_ids is None else self.token_ids
        # A stream leaves out the first tokens of a character that spans several. No later token is adjacent.
        if len(known) + len(tokens) == event.tokens_predicted:
            known.extend(tokens)
        self.token_ids = known
        if event.stop:
            self.is_complete = True
            self.usage = _Usage(event.tokens_evaluated, event.tokens_predicted)
        if event.truncated:
            self.error = "the server dropped tokens from its context"


def stream_payloads(raw: bytes) -> Iterator[bytes]:
    """The `data:` lines of a stream in order, `[DONE]` among them; a line cut short is not one."""
    lines = raw.split(b"\n")
    lines.pop()
    payloads = (line[5:].strip() for line in lines if line.startswith(b"data:"))
    # A request with several prompts has one before each prompt but the first.
    return (payload for payload in payloads if payload != b"null")


def read_answer(raw: bytes) -> CompletionOutput:
    """Reads the bytes of a streamed answer of any route."""
    answer = CompletionOutput()
    for payload in stream_payloads(raw):
        answer.read(payload)
    return answer


class _Token(msgspec.Struct):
    id: int
    piece: str | list[int]


class _Tokenised(msgspec.Struct):
    tokens: list[_Token]


async def known_tokens(control: ControlClient, answer: CompletionOutput) -> TokenIds[int]:
    """The leading sampled tokens whose ids are certain; the server tokenises the text.

    For requests that leave the text as it is sampled: no stop strings, which hold text back, and no parser,
    which may drop white space.
    """
    known: TokenIds[int] = array("i")
    if not answer.has_chunk_per_token:
        return known
    text = "".join(answer.pieces)
    request = {"content": text, "add_special": False, "parse_special": True, "with_pieces": True}
    tokenised = await control.read(_Tokenised, "POST", "/tokenize", json=request)
    for piece, token in zip(answer.pieces, tokenised.tokens, strict=False):
        # The server gives bytes that are no text as a list of numbers.
        if piece != token.piece or _NO_TEXT in piece:
            break
        known.append(token.id)
    return known


def slot_content(
    prompt: TokenIds[int], answer: CompletionOutput, sampled: TokenIds[int]
) -> tuple[TokenIds[int], int]:
    """The slot's content after the answer: known leading tokens, and the number of unknown ones that follow.

    `sampled` are the known tokens of the answer. A stream that broke off leaves at least the prompt. No token
    is known after an error, or if the server counted another number of prompt tokens.
    """
    n_prompt = len(prompt) if answer.prompt_tokens is None else answer.prompt_tokens
    length = n_prompt + max((answer.sampled_tokens or 0) - 1, 0)
    began = answer.sampled_tokens is not None or answer.pieces
    if n_prompt != len(prompt) or answer.error or not began:
        return array("i"), length if began else 0
    known = (prompt + sampled)[:length]
    return known, length - len(known)
