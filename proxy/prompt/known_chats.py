"""Remembers chats, so that a next turn encodes only what is new, and with media needs no engine to render."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from engine_adapter import JsonBody, common_prefix
from engine_adapter.body import decode_object
from engine_adapter.prompt.chat import ChatPrompt
from engine_adapter.types import ExtraIds, TokenIds
from proxy.prompt.media import is_text_message

# --- known chats ----------------------------------------------------------------------------------------
# Remembers the token ids and block hashes of chats, so that a chat's next turn encodes only what is new.
#
# text of a chat → segments, each beginning with the tokenizer's cut → known ones: ids and hashes are taken
#                                                                    → the others: encoded, and remembered
#
# A segment has the same ids alone as within the whole text, see `engine_adapter/prompt/encoders.py`. It is
# found by its own text and the segment before it, so all of the text up to it is compared, not a hash of
# it. Texts are kept and compared as UTF-8, which takes a quarter of the memory of a string with one emoji.
#
# Chats are known only within their namespace, which has KV of its own. So the time that a request takes does
# not tell one tenant what another sent.

LIMIT_BYTES = 32 * 2**20
"""Memory for the known chats of one pool: about 350 chats of 8,000 tokens of English."""
# Shorter messages share a segment, because each segment costs about 1 µs.
_LEAST_BYTES = 512
# Memory of a segment beside its text: its ids, the hashes of its blocks, and the objects that hold them.
_BYTES_PER_TOKEN, _OVERHEAD_BYTES = 7, 600
# JSON can hold half a surrogate pair.
_ERRORS = "surrogatepass"

_Key = tuple[Hashable, bytes]


class ChatOwner(msgspec.Struct, frozen=True, gc=False):
    """The owner of a chat.

    Attributes:
        salt, lora: the namespace of its KV. Requests in other namespaces do not find the chat.
        tenant: the tenant whose memory it counts against.
    """

    salt: str | None = None
    lora: str | None = None
    tenant: str | None = None

    @property
    def namespace(self) -> Hashable:
        """The namespace of the KV within a pool."""
        return self.salt, self.lora


@dataclass(slots=True)
class _Segment:
    """A piece of a known chat.

    Attributes:
        key: what it is found under: the segment before it, or the namespace of a first one, and its text.
        number: unique. The next segment's key holds it, so nothing is found after a forgotten segment.
        hashes: the blocks that end within this piece; None until the chat has been hashed.
    """

    key: _Key
    number: int
    token_ids: TokenIds[int]
    n_bytes: int
    hashes: tuple[int, ...] | None = None


@dataclass(slots=True)
class _Share:
    """The known chats of one tenant.

    Attributes:
        segments: by key; the least recently used comes first.
        newest: for the first part of a key, the newest segment that has it.
    """

    segments: OrderedDict[_Key, _Segment] = field(default_factory=OrderedDict)
    newest: dict[Hashable, _Segment] = field(default_factory=dict)
    n_bytes: int = 0

    def find(self, before: Hashable, text: bytes, start: int, cut: bytes) -> _Segment | None:
        """The segment that a text has at `start`, after the segment `before`; None if it is not known."""
        # Most chats only go on: then the text need not be searched, copied or hashed.
        newest = self.newest.get(before)
        if newest is not None:
            piece = newest.key[1]
            if text.startswith(piece, start) and text.startswith(cut, start + len(piece)):
                return newest
        end = text.find(cut, start + _LEAST_BYTES)
        return self.segments.get((before, text[start:end])) if end >= 0 else None

    def drop_oldest(self) -> int:
        """Forgets the least recently used segment; returns the memory it took."""
        _, segment = self.segments.popitem(last=False)
        if self.newest.get(segment.key[0]) is segment:
            del self.newest[segment.key[0]]
        self.n_bytes -= segment.n_bytes
        return segment.n_bytes


class ChatText(msgspec.Struct, frozen=True):
    """A chat's text: its known segments, and the pieces that must be encoded.

    Attributes:
        owner: whose chat it is.
        new: the pieces after them. All but the last one are segments, too.
        written: the same as UTF-8.
    """

    owner: ChatOwner
    known: Sequence[_Segment]
    new: Sequence[str]
    written: Sequence[bytes]


class KnownBeginning:
    """The segments that a prompt begins with, and the hashes of their blocks. Serves one chain."""

    def __init__(self, segments: list[_Segment]) -> None:
        self._segments = segments

    @property
    def hashes(self) -> tuple[int, ...]:
        """Hashes of the prompt's leading blocks, as many as are known."""
        found: list[int] = []
        for segment in self._segments:
            if segment.hashes is None:
                break
            found += segment.hashes
        return tuple(found)

    def learn(self, hashes: tuple[int, ...], tokens_per_block: int) -> None:
        """Remembers the block hashes of the whole prompt, and releases the segments."""
        tokens = blocks = 0
        for segment in self._segments:
            tokens += len(segment.token_ids)
            first, blocks = blocks, tokens // tokens_per_block
            if segment.hashes is None:
                segment.hashes = hashes[first:blocks]
        self._segments = []


class KnownChats:
    """The chats of one pool's tokenizer. Not thread-safe.

    Memory is bounded. At the limit, the tenant that takes most of it loses what it used least recently: no
    tenant loses anything while it takes less than an equal share."""

    def __init__(self, cut: str, *, limit_bytes: int = LIMIT_BYTES) -> None:
        """`cut` is the added token before which texts are cut, see `find_cut`."""
        self._cut = cut.encode()
        self._limit = limit_bytes
        self._shares: dict[str | None, _Share] = {}
        self._numbers = count()
        self.n_bytes = 0

    def read(self, text: str, owner: ChatOwner) -> ChatText:
        """Finds the known segments that a rendered chat begins with."""
        share = self._shares.get(owner.tenant) or _Share()
        whole, start = text.encode(errors=_ERRORS), 0
        before = owner.namespace
        known: list[_Segment] = []
        while segment := share.find(before, whole, start, self._cut):
            known.append(segment)
            before, start = segment.number, start + len(segment.key[1])
        written = self._pieces(whole, start)
        if not known and len(written) == 1:
            return ChatText(owner, (), [text], written)
        return ChatText(owner, known, [piece.decode(errors=_ERRORS) for piece in written], written)

    def add(
        self, chat: ChatText, encoded: Sequence[TokenIds[int]]
    ) -> tuple[TokenIds[int], KnownBeginning | None]:
        """Remembers the new segments of a chat that `read` gave; `encoded` are the ids of each piece in
        `chat.new`. Returns the ids of the whole text, and its known beginning; None if it is short."""
        if not chat.known and len(encoded) == 1:
            return encoded[0], None
        share = self._shares.setdefault(chat.owner.tenant, _Share())
        segments = list(chat.known)
        for piece, ids in zip(chat.written[:-1], encoded, strict=False):
            before = segments[-1].number if segments else chat.owner.namespace
            segments.append(self._keep(share, (before, piece), ids))
        # The last segment first: it is of no use without those before it.
        for segment in reversed(segments):
            if segment.key in share.segments:
                share.segments.move_to_end(segment.key)
        token_ids = array("i")
        for segment in segments:
            token_ids += segment.token_ids
        token_ids += encoded[-1]
        while self.n_bytes > self._limit:
            tenant, largest = max(self._shares.items(), key=lambda each: each[1].n_bytes)
            fair = self._limit // len(self._shares)
            while self.n_bytes > self._limit and largest.n_bytes > fair:
                self.n_bytes -= largest.drop_oldest()
            if not largest.segments:
                del self._shares[tenant]
        return token_ids, KnownBeginning(segments)

    def _pieces(self, text: bytes, start: int) -> list[bytes]:
        """The segments of a text from `start`, and the rest of it. They depend only on what precedes them."""
        pieces: list[bytes] = []
        while (end := text.find(self._cut, start + _LEAST_BYTES)) >= 0:
            pieces.append(text[start:end])
            start = end
        return [*pieces, text[start:]]

    def _keep(self, share: _Share, key: _Key, ids: TokenIds[int]) -> _Segment:
        """The segment under this key: a request that ran meanwhile may have added it."""
        segment = share.segments.get(key)
        if segment is None:
            n_bytes = sys.getsizeof(key[1]) + _BYTES_PER_TOKEN * len(ids) + _OVERHEAD_BYTES
            segment = _Segment(key, next(self._numbers), ids, n_bytes)
            share.segments[key] = share.newest[key[0]] = segment
            share.n_bytes += n_bytes
            self.n_bytes += n_bytes
        return segment


# --- known media ----------------------------------------------------------------------------------------
# Remembers chats with images, audio or video up to the last of these: a next turn needs no engine to render.
#
# as an engine rendered it   head: up to the end of the last message with media | tail: text alone
# the chat's next turn       the same head                                      | its own tail, encoded here
#
# A head is found by all that decides it: the messages with media, every field of the request that may change
# the prompt, and the ids of the other text up to there, which show whether the template writes an earlier
# message otherwise once others follow. It is kept only if the engine's own ids end with the tail that was
# encoded here.
#
# Each builder has heads of its own, so they never outlive a tokenizer or a template. Like the chats of
# `known_chats.py`, they are known only within their namespace.

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


def head_key(body: JsonBody, messages: Sequence[Any], around: TextAround, owner: ChatOwner) -> bytes:
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
