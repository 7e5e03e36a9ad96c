"""Refuses texts that cannot fit into a context, with as little work as possible.

A text of too many characters fits into no context. A shorter one that is still long for the context is first
encoded in pieces, until they have too many tokens. So the context bounds what a text costs, not its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized

MAX_CHARS_PER_TOKEN = 256
"""No tokenizer has longer tokens on average: a longer text cannot fit."""
# Texts with fewer characters for each token of the context are encoded at once: most text has three to six.
_USUAL_CHARS_PER_TOKEN = 8
_PIECE_CHARS = 64 << 10
# Pieces of a text have more tokens than the whole: a few at each cut, surely not so many more.
_OF_CUTS = 1.25


class CannotFit(Exception):
    """A text is longer than its context.

    Attributes:
        tokens: it has at least as many.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__(f"a text of at least {tokens} tokens does not fit")
        self.tokens = tokens


def check_fits(texts: Iterable[str], limit: int | None, encode: Callable[[str], Sized]) -> None:
    """Raises CannotFit if texts have more than `limit` tokens together. A text that passes may still have a
    few times as many; to encode it does not take long. `limit`: None where it is not known."""
    known = list(texts)
    chars = sum(map(len, known))
    if limit is None or chars <= max(limit * _USUAL_CHARS_PER_TOKEN, _PIECE_CHARS):
        return
    if chars > limit * MAX_CHARS_PER_TOKEN:
        raise CannotFit(chars // MAX_CHARS_PER_TOKEN)
    tokens = 0
    for text in known:
        for start in range(0, len(text), _PIECE_CHARS):
            tokens += len(encode(text[start : start + _PIECE_CHARS]))
            if tokens > limit * _OF_CUTS:
                raise CannotFit(int(tokens / _OF_CUTS))
