"""One request in the words of another API, served as a chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from engine_adapter import JsonBody
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
