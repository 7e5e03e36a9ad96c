"""One request in the words of another API, served as a chat: what is common to all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from typing_extensions import override

from engine_adapter import UNREADABLE, JsonBody
from proxy.errors import EngineFailed
from proxy.request.stages import DONE, ERROR, Event, Stage
from proxy.request.translate.wording import Wording

# --- the answers of chats as engines send them, whole and in chunks, and their token counts -------------


class _PromptDetails(Struct):
    """`created_cache_tokens` is vLLM's name of `cache_write_tokens`."""

    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    created_cache_tokens: int | None = None


class _OutputDetails(Struct):
    reasoning_tokens: int | None = None


class ChatUsage(Struct):
    """The usage of a chat."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _OutputDetails | None = None

    @property
    def cached(self) -> int:
        """Prompt tokens that came from the cache."""
        details = self.prompt_tokens_details
        return (details.cached_tokens if details is not None else None) or 0

    @property
    def reasoning(self) -> int:
        """Tokens of the answer that are reasoning."""
        details = self.completion_tokens_details
        return (details.reasoning_tokens if details is not None else None) or 0

    def written(self, tokens_per_block: int | None) -> int:
        """Prompt tokens that the cache got: as the engine says, else those of new full blocks."""
        details = self.prompt_tokens_details or _PromptDetails()
        for told in (details.cache_write_tokens, details.created_cache_tokens):
            if told is not None:
                return told
        block = tokens_per_block or 1
        return max(self.prompt_tokens // block * block - self.cached, 0)


class _Function(Struct):
    name: str | None = None
    arguments: str | None = None


class ToolCall(Struct):
    """A call of a tool, or what a chunk adds to it."""

    index: int | None = None
    id: str | None = None
    function: _Function | None = None

    @property
    def name(self) -> str:
        """The tool's name; empty if this does not tell it."""
        return (self.function.name if self.function is not None else None) or ""

    @property
    def arguments(self) -> str:
        """Its arguments, or a piece of them."""
        return (self.function.arguments if self.function is not None else None) or ""


class ChatMessage(Struct):
    """A message, or what a chunk adds to it. Engines have either name for reasoning."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def thoughts(self) -> str:
        """Its reasoning."""
        return self.reasoning_content or self.reasoning or ""


class _Logprobs(Struct):
    content: list[Raw] | None = None


class Choice(Struct):
    """A choice. `stop_reason` (vLLM) and `matched_stop` (SGLang): the stop sequence, or the id of a token."""

    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | list[int] | None = None

    @property
    def stop_sequence(self) -> str | None:
        """The stop sequence that ended it."""
        return next((at for at in (self.stop_reason, self.matched_stop) if isinstance(at, str)), None)


class Error(Struct):
    """An engine's description of a failure."""

    message: str = ""
    code: str | int | None = None
    param: str | None = None


class Chat(Struct):
    """A whole answer, or a chunk of one. `timings` and `prompt_progress` are llama-server's, `request_id` is
    that of kvpin's own errors."""

    given: list[Choice] | None = msgspec.field(name="choices", default=None)
    model: str | None = None
    usage: ChatUsage | None = None
    error: Error | str | None = None
    request_id: str | None = None
    timings: Raw | UnsetType = UNSET
    prompt_progress: Raw | UnsetType = UNSET

    @property
    def choices(self) -> list[Choice]:
        """Its choices. A chunk with usage may have null there."""
        return self.given or []


_decode = msgspec.json.Decoder(Chat).decode


def read_chat(content: bytes) -> Chat:
    """A whole answer, or a chunk of one. Raises EngineFailed if it is none."""
    try:
        return _decode(content)
    except UNREADABLE as error:
        raise EngineFailed("the engine's answer is not that of a chat") from error


# --- translation ----------------------------------------------------------------------------------------

Json = dict[str, Any]
CHAT_PATH = "/v1/chat/completions"
BROKEN_OFF = "the engine broke off its answer"
_ABORTED = "abort"  # the `finish_reason` of vLLM and SGLang where they stop a request, for example to sleep
_CUT = (None, _ABORTED)  # an answer that does not say why it ended was cut, too


def forced(name: str, n_tools: int) -> str | Json:
    """A chat's choice of one of its tools. llama-server reads an object as `auto`, so it gets one only where
    there is no other form."""
    return "required" if n_tools == 1 else {"type": "function", "function": {"name": name}}


class Predicted(NamedTuple):
    """Facts that kvpin knows of a prompt before the engine answers.

    Attributes:
        prompt_tokens: length of the prompt; None where it is not known.
        cached_tokens: prompt tokens that the engine is expected to reuse.
        tokens_per_block: the engine's block size in tokens, as it keeps full blocks; None where unknown.
    """

    prompt_tokens: int | None = None
    cached_tokens: int = 0
    tokens_per_block: int | None = None


class Translation(Stage, ABC):
    """A request, and the stage that turns the answer to its chat into the answer that its client asked for.
    One object serves one request.

    A stream is translated event by event: what tells nothing to the client is left out. A stream that breaks
    off has no end. Errors have the shape of the client's API already (`proxy/request/translate/wording.py`).

    Attributes:
        chat: the body of the chat that is served in its place. A stream asks for usage.
        counts: the request only asks how long its prompt is, which `count` answers: no engine serves it.
        wording: says errors about the chat in the client's words.
        source: the client's body with the items that it only names; None if it names none.
        changed: what was left out of the request or turned into text, at most 17 short names.
        predicted: for usage that the client gets before the engine tells it. Set before the answer begins.
        prewarms: only the prompt is to be computed: the client gets no answer.
        model: the model's name, as it was asked; else as the engine names it.
        usage: as the engine reports it.
        finish: why the engine ended its answer; None while it has not.
    """

    changes = True
    chat: JsonBody
    wording: Wording
    counts: bool = False
    source: JsonBody | None = None
    changed: tuple[str, ...] = ()
    predicted = Predicted()
    prewarms = False
    model: str | None = None
    usage: ChatUsage | None = None
    finish: str | None = None
    _begun = _is_garbled = _is_over = False
    _call_id, _n_calls = "", 0  # of the last call without an index; the number of these

    @override
    def event(self, event: Event) -> Iterable[Event]:
        if event.is_whole:
            made = self._of_error(event.data) if self.status >= ERROR else self._of_answer(event)
            return (Event(made, is_whole=True),)
        if event.data == DONE:  # an engine may close its stream a while later
            return self.end()
        if not event.data:  # a comment keeps the connection open
            return (Event(b":\n\n"),) if event.raw.startswith(b":") else ()
        return () if self._is_over else self._of_chunk(event)

    @override
    def end(self) -> Iterable[Event]:
        if self._is_over:
            return ()
        self._is_over = True
        if self._is_garbled or self.finish in _CUT:
            return self.failure(None)
        return self.last()

    def _of_answer(self, event: Event) -> bytes:
        chat = event.read(read_chat)
        choice = next(iter(chat.choices), None)
        if choice is None or choice.message is None:
            raise EngineFailed("the engine's answer is not that of a chat")
        self._note(chat, choice)
        if self.finish == _ABORTED:
            raise EngineFailed(BROKEN_OFF)
        return self.whole(choice)

    def _of_chunk(self, event: Event) -> Iterable[Event]:
        """The events that a chunk makes. Nothing follows what is no chunk, such as half an event of an engine
        that died, but an error. Nothing follows an error."""
        try:
            chunk = event.read(read_chat)
        except EngineFailed:
            self._is_garbled = True
            return ()
        if chunk.error:
            self._is_over = True
            return self.failure(event)
        if self._is_garbled:
            return ()
        choices = chunk.choices
        choice = choices[0] if choices else Choice()
        self._note(chunk, choice)
        return self.more(chunk, choice) if self._begun else [*self._first(), *self.more(chunk, choice)]

    def _first(self) -> Iterable[Event]:
        """The events before those of the first chunk, once."""
        has_begun, self._begun = self._begun, True
        return () if has_begun else self.first()

    def _note(self, chat: Chat, choice: Choice) -> None:
        self.model = self.model or chat.model
        self.usage = chat.usage or self.usage
        self.finish = choice.finish_reason or self.finish

    def _of_error(self, content: bytes) -> bytes:
        """An error of the engine, in the client's words."""
        error = msgspec.json.decode(content)
        match error:
            case {"error": {"message": str(message)} as told}:
                told["message"] = self.wording.text(message)
                if isinstance(param := told.get("param"), str):
                    told["param"] = self.wording.path(param)
                return msgspec.json.encode(error)
            case _:
                return content

    def said(self, choice: Choice) -> ChatMessage:
        """What a choice says to the client."""
        said = (not self.prewarms and (choice.message or choice.delta)) or ChatMessage()
        for call in said.tool_calls or () if choice.message is None else ():
            if call.index is None:  # the engine tells calls apart by their ids alone
                if call.name and call.id and call.id != self._call_id:
                    self._call_id, self._n_calls = call.id, self._n_calls + 1
                call.index = self._n_calls - 1 if self._n_calls else None
        return said

    @abstractmethod
    def whole(self, choice: Choice) -> bytes:
        """The answer to a request that is not streamed, from the first choice of a whole chat."""

    @abstractmethod
    def first(self) -> Iterable[Event]:
        """The events before those of the first chunk."""

    @abstractmethod
    def more(self, chunk: Chat, choice: Choice) -> Iterable[Event]:
        """The events of a chunk, `choice` is its first."""

    @abstractmethod
    def failure(self, event: Event | None) -> Iterable[Event]:
        """The last events of a stream that fails; `event` tells the error; None: the engine broke off."""

    @abstractmethod
    def last(self) -> Iterable[Event]:
        """The last events of a stream that is complete."""

    @abstractmethod
    def count(self, tokens: int) -> bytes:
        """The answer to a request that counts."""


def named_event(fields: Json) -> Event:
    """An event whose name is its type."""
    return Event(b"event: %b\ndata: %b\n\n" % (fields["type"].encode(), msgspec.json.encode(fields)))


Translate = Callable[[JsonBody, str | None], Translation]
"""Translates a body, for the tenant that sent it. Raises ProxyError for one that cannot be served."""
