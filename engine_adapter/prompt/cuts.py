"""Places where a text can be cut so that its pieces, encoded alone, give the ids of the whole.

A tokenizer first finds its added tokens in the text, from left to right. It then normalises, splits and
encodes what lies between two of them without a look at the rest. So a text can be cut before an added token
that is found there whatever surrounds it. `cut_tokens` proves this from the tokenizer's list of added tokens.
`find_cut` picks one that chats contain, and compares cut and whole texts as well.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import product
from typing import TYPE_CHECKING

import msgspec

from engine_adapter.errors import ChatError

if TYPE_CHECKING:
    from engine_adapter.prompt.chat import ChatTokenizer


class AddedToken(msgspec.Struct, frozen=True):
    """A token that is looked for in a text before the text is split; the fields are those of `tokenizers`."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    normalized: bool = True


_CHAT = [
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "It is so."},
    {"role": "user", "content": "Thanks."},
]
# Ends and beginnings that may interact with what stands beside them.
_ENDS = ("", "a", " ", "\n", "é", "e\u0301", "\u3000", "<", "<|", "\u200d", "don'", "12", "漢", "  \t")
_STARTS = (*_ENDS, "\u0301", "'s", "|>", " b")
_NEIGHBOURS = 8  # added tokens


def cut_tokens(added: Iterable[AddedToken]) -> tuple[str, ...]:
    """The added tokens before which a text can be cut, in order.

    Such a token is looked for in the text as it stands and takes no space from its left. No added token can
    begin before it and reach into it, or be found in its place. There are none if any added token must stand
    alone as a word, because then its neighbours decide.
    """
    tokens = [token for token in added if token.content]
    if any(token.single_word for token in tokens):
        return ()
    return tuple(token.content for token in tokens if _is_cut(token, tokens))


def _is_cut(token: AddedToken, tokens: Iterable[AddedToken]) -> bool:
    cut = token.content
    if token.normalized or token.lstrip or cut[0].isspace():
        return False
    return not any(_hides(other.content, cut) for other in tokens)


def _hides(other: str, cut: str) -> bool:
    """True if an occurrence of `other` can hide one of `cut`: `other` is longer and begins with `cut`, or it
    begins further left and overlaps it."""
    ends = (other[start:] for start in range(1, len(other)))
    is_longer = other != cut and other.startswith(cut)
    return is_longer or any(cut.startswith(end) or end.startswith(cut) for end in ends)


def find_cut(tokenizer: ChatTokenizer) -> str | None:
    """The added token before which this tokenizer's chats are cut; None if they must be encoded whole.

    It is the one that the chat template writes most often.
    """
    try:
        text = tokenizer.render(_CHAT)
    except ChatError:
        return None
    # A token that only begins the chat cuts nothing off.
    found = [token for token in tokenizer.cuts if text.rfind(token) > 0]
    cut = max(found, key=text.count, default=None)
    return cut if cut is not None and _is_exact(tokenizer, cut, text) else None


def _is_exact(tokenizer: ChatTokenizer, cut: str, chat: str) -> bool:
    """True if texts cut before `cut` give the ids of the whole texts."""
    for text in (chat, *_texts(cut, tokenizer.cuts[:_NEIGHBOURS])):
        head, *tails = text.split(cut)
        ids = array("i")
        for piece in (head, *(cut + tail for tail in tails)):
            ids += tokenizer.encode(piece, add_special_tokens=False)
        if ids != tokenizer.encode(text, add_special_tokens=False):
            return False
    return True


def _texts(cut: str, neighbours: tuple[str, ...]) -> Iterator[str]:
    """Texts in which `cut` stands between all kinds of neighbours."""
    for end, start in product((*_ENDS, *neighbours), (*_STARTS, *neighbours)):
        yield f"{end}{cut}{start}"
