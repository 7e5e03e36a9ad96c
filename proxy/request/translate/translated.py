"""The client of a translated request."""

from __future__ import annotations

import msgspec
from typing_extensions import override

from engine_adapter import HeaderPairs, is_silent
from proxy.request.calls import Client, Through
from proxy.request.translate.sse import DONE, Events
from proxy.request.translate.translation import Translation

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

    def __init__(self, client: Client, translation: Translation) -> None:
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
