"""Remembers chats with images, audio or video up to the last of these: a next turn needs no engine to render.

    as an engine rendered it   head: up to the end of the last message with media | tail: text alone
    the chat's next turn       the same head                                      | its own tail, encoded here

A head is found by all that decides it: the messages with media, every field of the request that may change
the prompt, and the ids of the other text up to there, which show whether the template writes an earlier
message otherwise once others follow. It is kept only if the engine's own ids end with the tail that was
encoded here.

Each builder has heads of its own, so they never outlive a tokenizer or a template. Like the chats of
`known_chats.py`, they are known only within their namespace.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine_adapter import JsonBody, common_prefix
from engine_adapter.body import decode_object
from engine_adapter.prompt.chat import ChatPrompt
from engine_adapter.types import ExtraIds, TokenIds
from proxy.prompt.known_chats import Owner
from proxy.prompt.media import is_text_message

LIMIT_TOKENS = 2**21
"""Tokens of all heads of one builder: 24 MiB."""
_OVERHEAD_TOKENS = 64
# Fields that change no prompt. The others, also those that kvpin does not know, are compared.
_BESIDE_PROMPT = frozenset(
    {
        "messages", "cache_salt", "stream", "stream_options", "max_tokens", "max_completion_tokens",
        "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n", "user", "metadata", "logprobs",
        "top_logprobs", "presence_penalty", "frequency_penalty",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TextAround:
    """Ids of a chat in which a text stands for the content of each message with media.

    Attributes:
        token_ids: all of them, with the first text.
        before, after: the lengths of what another text leaves the same, at the beginning and at the end.
    """

    token_ids: TokenIds[int]
    before: int
    after: int

    @classmethod
    def of(cls, one: TokenIds[int], other: TokenIds[int]) -> TextAround:
        """`one` and `other`: the ids with two texts."""
        before = common_prefix(one, other)
        after = common_prefix(one[::-1], other[::-1])
        return cls(one, before, min(after, min(len(one), len(other)) - before))

    @property
    def tail(self) -> TokenIds[int]:
        """What follows the last message with media."""
        return self.token_ids[len(self.token_ids) - self.after :]

    @property
    def head(self) -> TokenIds[int]:
        """What is up to there."""
        return self.token_ids[: len(self.token_ids) - self.after]


@dataclass(frozen=True, slots=True)
class _Head:
    """An engine's ids up to the end of the last message with media, and the first id behind."""

    token_ids: TokenIds[int]
    extra_ids: ExtraIds[int]
    next_id: int


class KnownMedia:
    """The heads of one builder; the least recently used goes first."""

    def __init__(self, limit: int = LIMIT_TOKENS) -> None:
        """`limit`: tokens of all of them."""
        self._heads: OrderedDict[bytes, _Head] = OrderedDict()
        self._tokens, self._limit = 0, limit

    def find(self, key: bytes, around: TextAround) -> ChatPrompt | None:
        """The whole prompt; None if its head is not known."""
        head = self._heads.get(key)
        if head is None or not around.after or around.tail[0] != head.next_id:
            return None
        self._heads.move_to_end(key)
        return ChatPrompt(head.token_ids + around.tail, head.extra_ids + array("Q", bytes(8 * around.after)))

    def learn(self, key: bytes, around: TextAround, rendered: ChatPrompt) -> None:
        """Remembers what an engine has rendered, if it ends with the same tail."""
        size = len(rendered.token_ids) - around.after
        ids, extra_ids = rendered.token_ids, rendered.extra_ids
        if extra_ids is None or not around.after or size <= 0 or ids[size:] != around.tail:
            return
        if any(extra_ids[size:]):
            return
        old = self._heads.pop(key, None)
        self._heads[key] = _Head(ids[:size], extra_ids[:size], ids[size])
        self._tokens += _size(self._heads[key]) - (_size(old) if old is not None else 0)
        while self._tokens > self._limit:
            self._tokens -= _size(self._heads.popitem(last=False)[1])


def head_key(body: JsonBody, messages: Sequence[Any], around: TextAround, owner: Owner) -> bytes:
    """All that decides the head of a chat, as a digest. Takes about 2 ms for each MiB of the body."""
    with_media = [(at, each) for at, each in enumerate(messages) if not is_text_message(each)]
    fields = sorted(
        (name, raw) for name, raw in decode_object(body.raw).items() if name not in _BESIDE_PROMPT
    )
    parts = [owner.salt, owner.lora, owner.tenant, with_media, fields]
    digest = hashlib.blake2b(msgspec.json.encode(parts), digest_size=32)
    digest.update(around.head.tobytes())
    return digest.digest()


def _size(head: _Head) -> int:
    return len(head.token_ids) + _OVERHEAD_TOKENS
