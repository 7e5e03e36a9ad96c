"""Remembers the token ids and block hashes of chats, so that a chat's next turn encodes only what is new.

    text of a chat → segments, each beginning with the tokenizer's cut → known ones: ids and hashes are taken
                                                                       → the others: encoded, and remembered

A segment has the same ids alone as within the whole text, see `engine_adapter/prompt/cuts.py`. It is found by
its own text and the segment before it, so all of the text up to it is compared, not a hash of it.

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

from engine_adapter.types import TokenIds

LIMIT_BYTES = 64 * 2**20
"""Memory for the known chats of one pool: about 5 million tokens of English."""
# Shorter messages share a segment, because each segment costs about 1 µs.
_LEAST_CHARS = 512
# What a segment takes beside its text: its ids, the hashes of its blocks, and the objects that hold them.
_BYTES_PER_TOKEN, _OVERHEAD_BYTES = 7, 500

_Key = tuple[Hashable, str]


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a chat is.

    Attributes:
        salt, lora: what its KV lies under. Chats under others do not know it.
        tenant: whose memory it counts to.
    """

    salt: str | None = None
    lora: str | None = None
    tenant: str | None = None

    @property
    def namespace(self) -> Hashable:
        """What the KV lies under, within a pool."""
        return self.salt, self.lora


@dataclass(slots=True)
class _Segment:
    """A piece of a known chat.

    Attributes:
        number: unique. The next segment's key holds it, so nothing is found after a forgotten segment.
        token_ids: the ids of this piece.
        n_bytes: the memory it takes.
        hashes: the blocks that end within this piece; None until the chat has been hashed.
    """

    number: int
    token_ids: TokenIds[int]
    n_bytes: int
    hashes: tuple[int, ...] | None = None


@dataclass(slots=True)
class _Share:
    """The known chats of one tenant; the least recently used segment comes first."""

    segments: OrderedDict[_Key, _Segment] = field(default_factory=OrderedDict)
    n_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ChatText:
    """A chat's text: its known segments, and the pieces that must be encoded.

    Attributes:
        owner: whose chat it is.
        known: the known segments, and the keys they are found under.
        new: the pieces after them. All but the last one are segments, too.
    """

    owner: Owner
    known: Sequence[tuple[_Key, _Segment]]
    new: Sequence[str]

    @property
    def new_chars(self) -> int:
        """The length of what must be encoded."""
        return sum(map(len, self.new))


class KnownBeginning:
    """The segments that a prompt begins with, and the hashes of their blocks. Serves one chain."""

    def __init__(self, segments: list[_Segment]) -> None:
        self._segments = segments

    @property
    def hashes(self) -> tuple[int, ...]:
        """Hashes of the prompt's leading blocks, as many as are known."""
        found = list[int]()
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
        self._cut = cut
        self._limit = limit_bytes
        self._shares: dict[str | None, _Share] = {}
        self._numbers = count()
        self.n_bytes = 0

    def read(self, text: str, owner: Owner) -> ChatText:
        """Finds the known segments that a rendered chat begins with."""
        share = self._shares.get(owner.tenant) or _Share()
        known = list[tuple[_Key, _Segment]]()
        pieces = self._pieces(text)
        parent = owner.namespace
        for piece in pieces[:-1]:
            key = (parent, piece)
            segment = share.segments.get(key)
            if segment is None:
                break
            known.append((key, segment))
            parent = segment.number
        return ChatText(owner, known, pieces[len(known) :])

    def add(self, chat: ChatText, encoded: Sequence[TokenIds[int]]) -> tuple[TokenIds[int], KnownBeginning]:
        """Remembers the new segments. Returns the ids of the whole text, and its known beginning.

        Args:
            chat: the text, as `read` gave it.
            encoded: the ids of each piece in `chat.new`.
        """
        share = self._shares.setdefault(chat.owner.tenant, _Share())
        path = list(chat.known)
        for piece, ids in zip(chat.new[:-1], encoded, strict=False):
            key = (path[-1][1].number if path else chat.owner.namespace, piece)
            path.append((key, self._keep(share, key, ids)))
        # The last segment first: it is of no use without those before it.
        for key, _ in reversed(path):
            if key in share.segments:
                share.segments.move_to_end(key)
        segments = [segment for _, segment in path]
        token_ids = array("i")
        for segment in segments:
            token_ids += segment.token_ids
        token_ids += encoded[-1]
        self._shrink()
        return token_ids, KnownBeginning(segments)

    def _pieces(self, text: str) -> list[str]:
        """The segments of a text, and the rest of it. A text's segments depend only on what precedes them."""
        pieces, start = list[str](), 0
        while (end := text.find(self._cut, start + _LEAST_CHARS)) >= 0:
            pieces.append(text[start:end])
            start = end
        return [*pieces, text[start:]]

    def _keep(self, share: _Share, key: _Key, ids: TokenIds[int]) -> _Segment:
        """The segment under this key: a request that ran meanwhile may have added it."""
        segment = share.segments.get(key)
        if segment is None:
            n_bytes = sys.getsizeof(key[1]) + _BYTES_PER_TOKEN * len(ids) + _OVERHEAD_BYTES
            segment = share.segments[key] = _Segment(next(self._numbers), ids, n_bytes)
            share.n_bytes += n_bytes
            self.n_bytes += n_bytes
        return segment

    def _shrink(self) -> None:
        """Forgets segments until the limit is kept."""
        while self.n_bytes > self._limit:
            tenant, share = max(self._shares.items(), key=lambda each: each[1].n_bytes)
            _, segment = share.segments.popitem(last=False)
            share.n_bytes -= segment.n_bytes
            self.n_bytes -= segment.n_bytes
            if not share.segments:
                del self._shares[tenant]
