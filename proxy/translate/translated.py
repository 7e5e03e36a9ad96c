"""The client of a translated request."""

from __future__ import annotations

from engine_adapter import HeaderPairs
from proxy.request.calls import Client
from proxy.translate.sse import DONE, Events
from proxy.translate.translation import Translation

_STREAM = b"text/event-stream"
_ERROR = 400


class Translated:
    """Takes the answer to the chat, and sends its translation to the client.

    A stream is translated event by event. A stream that breaks off has no end: the client notices. Of any
    other answer nothing is sent before it was translated: until then it can still fail.
    """

    def __init__(self, client: Client, translation: Translation) -> None:
        self._client = client
        self._translation = translation
        self._events: Events | None = None  # those of a stream
        self._whole: list[bytes] = []  # pieces of any other answer
        self._head: tuple[int, HeaderPairs] = 200, []  # of any other answer

    @property
    def is_full(self) -> bool:
        """See Client."""
        return self._client.is_full

    async def drain(self) -> None:
        """See Client."""
        await self._client.drain()

    def start(self, status: int, headers: HeaderPairs) -> None:
        """See Client."""
        if (b"content-type", True) in ((name, value.startswith(_STREAM)) for name, value in headers):
            self._events = Events()
            self._client.start(status, headers)
        else:
            self._head = status, [pair for pair in headers if pair[0] != b"content-length"]

    def write(self, chunk: bytes) -> None:
        """See Client."""
        if self._events is None:
            self._whole.append(chunk)
        elif events := self._translated(self._events, chunk):
            self._client.write(events)

    def finish(self, chunk: bytes) -> None:
        """See Client."""
        if self._events is not None:
            self._client.finish(self._translated(self._events, chunk) + self._translation.end())
            return
        content, (status, headers) = b"".join([*self._whole, chunk]), self._head
        translate = self._translation.error if status >= _ERROR else self._translation.answer
        translated = translate(content)
        self._client.start(status, headers)
        self._client.finish(translated)

    def _translated(self, events: Events, chunk: bytes) -> bytes:
        return b"".join(self._translation.event(data) for data in events.feed(chunk) if data != DONE)
