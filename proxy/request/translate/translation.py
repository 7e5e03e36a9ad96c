"""One request in the words of another API, served as a chat: what a translation is, and the client that gets
the answer to the chat and sends the translated one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec
from typing_extensions import override

from engine_adapter import HeaderPairs, JsonBody, WholeEvents, is_silent
from proxy.request.calls import Through, Writer
from proxy.request.translate.wording import Wording

CHAT_PATH = "/v1/chat/completions"


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


class Translation(Protocol):
    """A request and its answer. One object serves one request.

    Attributes:
        chat: the body of the chat that is served in its place. A stream asks for usage.
        counts: the request only asks how long its prompt is, which `count` answers: no engine serves it.
        wording: says errors about the chat in the client's words.
        source: the client's body with the items that it only names; None if it names none.
        changed: what was left out of the request or turned into text, at most 17 short names.
        predicted: for usage that the client gets before the engine tells it. Set before the answer begins.
    """

    chat: JsonBody
    wording: Wording
    counts: bool = False
    source: JsonBody | None = None
    changed: tuple[str, ...] = ()
    predicted: Predicted = Predicted()

    def answer(self, content: bytes) -> bytes:
        """The answer, from a whole `chat.completion`."""

    def count(self, tokens: int) -> bytes:
        """The answer to a request that counts."""

    def event(self, payload: bytes) -> bytes:
        """Translates the data of one event of the chat's stream into events for the client, or into nothing.

        An event with `error` ends the stream.
        """

    def end(self) -> bytes:
        """The client's events for the end of the chat's stream, which may have come too early."""


Translate = Callable[[JsonBody, str | None], Translation]
"""Translates a body, for the tenant that sent it. Raises ProxyError for one that cannot be served."""


_STREAM = b"text/event-stream"
_COMMENT = b":\n\n"
_ERROR = 400


class Translated(Through):
    """Takes the answer to the chat, and sends its translation to the client.

    A stream is translated event by event. A stream that breaks off has no end: the client notices. For an
    engine's comment the client gets one, too: it keeps the connection open. Of any other answer nothing is
    sent before it was translated: until then it can still fail. Errors have the shape of the client's API
    already (`proxy/request/dialects.py`).
    """

    def __init__(self, client: Writer, translation: Translation) -> None:
        super().__init__(client)
        self._translation = translation
        self._events: Events | None = None  # those of a stream
        self._ended = False  # the end of a stream was sent
        self._whole: list[bytes] = []  # pieces of any other answer
        self._head: tuple[int, HeaderPairs] = 200, []  # of any other answer

    @override
    def start(self, status: int, headers: HeaderPairs) -> None:
        if (b"content-type", True) in ((name, value.startswith(_STREAM)) for name, value in headers):
            self._events = Events()
            self._client.start(status, headers)
        else:
            self._head = status, [pair for pair in headers if pair[0] != b"content-length"]

    @override
    def write(self, chunk: bytes) -> None:
        if self._events is None:
            self._whole.append(chunk)
        elif events := self._translated(self._events, chunk):
            self._client.write(events)
        elif is_silent(chunk):
            self._client.write(_COMMENT)

    @override
    def finish(self, chunk: bytes) -> None:
        if self._events is not None:
            events = self._translated(self._events, chunk)
            self._client.finish(events if self._ended else events + self._translation.end())
            return
        content, (status, headers) = b"".join([*self._whole, chunk]), self._head
        content = self._translation.answer(content) if status < _ERROR else self._error(content)
        self._client.start(status, headers)
        self._client.finish(content)

    def _error(self, content: bytes) -> bytes:
        """An error of the engine, in the client's words."""
        wording, error = self._translation.wording, msgspec.json.decode(content)
        match error:
            case {"error": {"message": str(message)} as told}:
                told["message"] = wording.text(message)
                if isinstance(param := told.get("param"), str):
                    told["param"] = wording.path(param)
                return msgspec.json.encode(error)
            case _:
                return content

    def _translated(self, events: Events, chunk: bytes) -> bytes:
        return b"".join(map(self._event, events.feed(chunk)))

    def _event(self, data: bytes) -> bytes:
        if data != DONE:
            return self._translation.event(data)
        self._ended = True  # an engine may close its stream a while later
        return self._translation.end()


_DATA = b"data:"
DONE = b"[DONE]"


class Events:
    """Collects chunks, and gives the data of each event that is complete."""

    __slots__ = ("_whole",)

    def __init__(self) -> None:
        self._whole = WholeEvents()

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes, in order; events without data are left out."""
        return [data for data in map(_data_of, self._whole.feed(chunk)) if data]


def _data_of(event: bytes) -> bytes:
    lines = (line[len(_DATA) :].strip() for line in event.splitlines() if line.startswith(_DATA))
    return b"\n".join(lines)
