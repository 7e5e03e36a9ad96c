"""One request in the words of another API, served as a chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from engine_adapter import JsonBody

CHAT_PATH = "/v1/chat/completions"


class Translation(Protocol):
    """A request and its answer. One object serves one request.

    Attributes:
        chat: the body of the chat that is served in its place. A stream asks for usage.
    """

    chat: JsonBody

    def answer(self, content: bytes) -> bytes:
        """The answer, from a whole `chat.completion`."""

    def error(self, content: bytes) -> bytes:
        """An error in the API's shape, from one in OpenAI's."""

    def event(self, payload: bytes) -> bytes:
        """What the client gets for the data of one event of the chat's stream: events, or nothing."""

    def end(self) -> bytes:
        """What the client gets when the chat's stream has ended as it should."""


# Route → what translates a body that was sent there. Raises BadRequest for one that cannot be served.
TRANSLATIONS: Mapping[str, Callable[[JsonBody], Translation]] = {}
