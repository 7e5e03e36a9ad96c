"""Remembers the token ids and block hashes of chats, so that a chat's next turn encodes only what is new.

    text of a chat → segments, each beginning with the tokenizer's cut → known ones: ids and hashes are taken
                                                                       → the others: encoded, and remembered

A segment has the same ids alone as within the whole text, see `engine_adapter/prompt/cuts.py`. It is found by
its own text and the segment before it, so all of the text up to it is compared, not a hash of it. Texts are
kept and compared as UTF-8, which takes a quarter of the memory of a string with one emoji.

Chats are known only within their namespace, which has KV of its own. So the time that a request takes does
not tell one tenant what another sent.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count

import msgspec

from engine_adapter.types import TokenIds

LIMIT_BYTES = 32 * 2**20
"""Memory for the known chats of one pool: about 350 chats of 8,000 tokens of English."""
# Shorter messages share a segment, because each segment costs about 1 µs.
_LEAST_BYTES = 512
# Memory of a segment beside its text: its ids, the hashes of its blocks, and the objects that hold them.
_BYTES_PER_TOKEN, _OVERHEAD_BYTES = 7, 600
# JSON can hold half a surrogate pair.
_ERRORS = "surrogatepass"

_Key = tuple[Hashable, bytes]


class Owner(msgspec.Struct, frozen=True, gc=False):
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

    owner: Owner
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
    tenant loses anything while it takes less than an equal share.
    """

    def __init__(self, cut: str, *, limit_bytes: int = LIMIT_BYTES) -> None:
        """`cut` is the added token before which texts are cut, see `find_cut`."""
        self._cut = cut.encode()
        self._limit = limit_bytes
        self._shares: dict[str | None, _Share] = {}
        self._numbers = count()
        self.n_bytes = 0

    def read(self, text: str, owner: Owner) -> ChatText:
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
        self._shrink()
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

    def _shrink(self) -> None:
        """Forgets segments until the limit is kept."""
        while self.n_bytes > self._limit:
            tenant, share = max(self._shares.items(), key=lambda each: each[1].n_bytes)
            fair = self._limit // len(self._shares)
            while self.n_bytes > self._limit and share.n_bytes > fair:
                self.n_bytes -= share.drop_oldest()
            if not share.segments:
                del self._shares[tenant]
