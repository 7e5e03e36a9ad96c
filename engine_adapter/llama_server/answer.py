"""Reads an answer: what it says, its counts, and the tokens that it left in its slot.

After an answer a slot holds (prompt + sampled)[: n_prompt + n_sampled - 1]: the last token is never decoded.
The server tells the counts. Its own completion routes also tell the ids of the sampled tokens. Its OpenAI
routes do not, but their streams usually have one chunk per token. Where the counts prove that, the ids are
those of the answer's text, as far as each token has the text of its chunk. All other ids are unknown until
the slot is saved: the header of the file has them.

Chats and completions that want one JSON answer are sent as streams, because the server finishes any other
request even after its client has left. `assembled` makes the answer, with the server's own fields. A stream
lacks three things. It has no half character and no start of a tool call that `max_tokens` cut off. In a chat
it has no `logprobs` of tokens without text, such as the end of a turn. And it does not tell which `logprobs`
belong to a stop string: all are kept.

The server parses a chat's whole answer at its end. If it cannot, it ends with an error, after all that was
generated. Another server would do the same: the client gets what was parsed before, as `stop`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine_adapter.body import UNREADABLE
from engine_adapter.errors import EngineDied, EngineGarbled
from engine_adapter.http.answer_fields import EngineErrorBody, read_error
from engine_adapter.http.control import ControlClient
from engine_adapter.types import TokenIds

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_DONE = b"[DONE]"  # the last payload of most streams
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
    content: list[msgspec.Raw] | None = None


class _ChoiceChunk(msgspec.Struct):
    """One choice in a chunk of a stream."""

    index: int = 0
    text: str | None = None
    delta: _Delta = msgspec.field(default_factory=_Delta)
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _StreamChunk(msgspec.Struct):
    """One chunk of a stream. The fields after `prompt_progress` are those of the server's own completions."""

    choices: list[_ChoiceChunk] = []
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None
    prompt_progress: Any = None
    tokens: list[int] | None = None
    stop: bool = False
    truncated: bool | None = None
    tokens_evaluated: int | None = None
    tokens_predicted: int | None = None


_decode_chunk = msgspec.json.Decoder(_StreamChunk).decode
_decode_fields = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass(slots=True)
class _ToolCall:
    name: str = ""
    id: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class CompletionOutput:
    """The content of an answer of one choice. Counts are in tokens, None where the server tells none."""

    # The text of each chunk that has some, in order; `reasoning`, `calls` (by their index) and `logprobs`:
    # what else there was.
    pieces: list[str] = field(default_factory=list)
    is_plain: bool = True  # the pieces are all there was: no reasoning, no tool call, no second choice
    is_complete: bool = False
    finish_reason: str | None = None
    error: str | None = None  # the message of an error that ended the stream
    usage: _Usage = field(default_factory=_Usage)
    timings: _Timings = field(default_factory=_Timings)
    # The leading sampled tokens, if the server reports token ids; else None.
    token_ids: TokenIds[int] | None = None
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, _ToolCall] = field(default_factory=dict)
    logprobs: list[msgspec.Raw] = field(default_factory=list)
    has_ended: bool = False  # the stream told its end
    failure: EngineErrorBody | None = None  # all of that error
    unreadable: Exception | None = None  # why an event could not be read
    # The server's own fields, of the events with the counts.
    fields: dict[str, Any] = field(default_factory=dict)
    _last: bytes = b"{}"

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
        """True if the counts prove that each sampled token has its own chunk. The end of a turn has no text.
        Another token without text, or one whose text was held back because it ends inside a character, makes
        the pieces fewer than the tokens."""
        ended = self.finish_reason == "stop"
        return self.is_plain and bool(self.pieces) and len(self.pieces) + ended == self.sampled_tokens

    @property
    def says_something(self) -> bool:
        """True if there is text, reasoning or a call."""
        return bool(self.pieces or self.reasoning or self.calls)

    def read(self, payload: bytes) -> None:
        """Reads one event. An unreadable event is no error, but the answer is then not plain."""
        if payload == _DONE:
            self.is_complete = self.has_ended = True
            return
        try:
            event = _decode_chunk(payload)
            if event.error is not None:
                self.failure = read_error(payload)
                self.error = self.failure.message
                return
            if event.prompt_progress is None:  # sent before the first token
                for choice in event.choices:
                    self._read_choice(choice)
                if event.tokens is not None:
                    self._read_native_event(event, event.tokens)
            # An answer ends with counts, maybe in a chunk without choices.
            if self.finish_reason is not None:
                self.fields |= _decode_fields(payload)
        except UNREADABLE as error:
            self.is_plain, self.unreadable = False, error
            return
        self._last = payload
        self.usage = event.usage or self.usage
        self.timings = event.timings or self.timings

    def _read_choice(self, choice: _ChoiceChunk) -> None:
        delta = choice.delta
        if choice.index or delta.reasoning_content is not None or delta.tool_calls is not None:
            # Reasoning stands between tags that are left out, and spaces next to them may be as well.
            self.is_plain = False
        if delta.reasoning_content:
            self.reasoning.append(delta.reasoning_content)
        if text := choice.text or delta.content:
            self.pieces.append(text)
        for part in delta.tool_calls or ():
            call = self.calls.setdefault(part.index, _ToolCall())
            # Arguments come in parts. A name that grew is sent again in whole.
            call.name = part.function.name or call.name
            call.id = part.id or call.id
            call.arguments.append(part.function.arguments or "")
        if choice.logprobs is not None:
            self.logprobs.extend(choice.logprobs.content or ())
        if choice.finish_reason is not None:
            self.finish_reason, self.is_complete = choice.finish_reason, True

    def _read_native_event(self, event: _StreamChunk, tokens: list[int]) -> None:
        """A chunk of one of the server's own completions, or the whole answer."""
        known = array("i") if self.token_ids is None else self.token_ids
        # A stream leaves out the first tokens of a character that spans several. No later token is adjacent.
        if len(known) + len(tokens) == event.tokens_predicted:
            known.extend(tokens)
        self.token_ids = known
        # A client may have left any field out (`response_fields`): without the counts, the slot tells.
        if event.stop and None not in (event.tokens_evaluated, event.tokens_predicted):
            self.is_complete = True
            self.usage = _Usage(event.tokens_evaluated, event.tokens_predicted)
        if event.stop and event.truncated is not False:
            self.error = "the server dropped tokens from its context"

    def assembled(self, path: str) -> bytes:
        """The JSON answer of a chat or completion that was sent as a stream. Raises EngineRejected if that
        has an error, and EngineUnavailable if it ended too early or is no stream."""
        finish_reason, fields = self.finish_reason, self.fields
        if self.unreadable is not None:
            raise EngineGarbled(f"llama-server sent an unreadable chunk: {self.unreadable}")
        if self.failure is not None:
            if not (self.failure.is_unparsed and self.says_something):
                raise self.failure.rejection()
            finish_reason, fields = finish_reason or "stop", fields or _decode_fields(self._last)
        elif not self.has_ended or finish_reason is None:
            raise EngineDied("llama-server ended its answer too early")
        logprobs = {"content": self.logprobs} if self.logprobs else None
        if path == CHAT:
            kind = "chat.completion"
            choice: dict[str, Any] = {"finish_reason": finish_reason, "index": 0, "message": self._message()}
            choice |= {"logprobs": logprobs} if logprobs else {}
        else:
            kind, text = "text_completion", "".join(self.pieces)
            choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish_reason}
        return msgspec.json.encode({**fields, "choices": [choice], "object": kind})

    def _message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.pieces)}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": "".join(call.arguments)}}
                | ({"id": call.id} if call.id else {})
                for _, call in sorted(self.calls.items())
            ]
        return message


def read_answer(raw: bytes) -> CompletionOutput:
    """Reads the bytes of a streamed answer of any route. A line that is cut short is not read."""
    answer = CompletionOutput()
    for line in raw.split(b"\n")[:-1]:
        if line.startswith(b"data:"):
            answer.read(line[5:].strip())
    return answer


class _Token(msgspec.Struct):
    id: int
    piece: str | list[int]


class _Tokenised(msgspec.Struct):
    tokens: list[_Token]


async def known_tokens(control: ControlClient, answer: CompletionOutput) -> TokenIds[int]:
    """The leading sampled tokens whose ids are certain; the server tokenises the text. For requests that
    leave the text as it is sampled: no stop strings, which hold text back, and no parser, which may drop
    white space."""
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
    is known after an error, or if the server counted another number of prompt tokens."""
    n_prompt = len(prompt) if answer.prompt_tokens is None else answer.prompt_tokens
    length = n_prompt + max((answer.sampled_tokens or 0) - 1, 0)
    began = answer.sampled_tokens is not None or answer.says_something
    if n_prompt != len(prompt) or answer.error or not began:
        return array("i"), length if began else 0
    known = (prompt + sampled)[:length]
    return known, length - len(known)
