"""Turns generated tokens into text, piece by piece, and watches for stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from engine_adapter.prompt.chat import ChatTokenizer

_UNFINISHED = "\ufffd"  # how a tokenizer shows bytes that are not yet a whole character
# A character has at most four bytes, and so at most four tokens.
_MOST_TOKENS = 4


class Detokenizer:
    """The text of one answer, token by token.

    The text of a token depends on its neighbours (spaces, characters of several tokens). So each token
    decodes a short window again, and the text the window had before is cut off. Bytes of an unfinished
    character are held back until the character is whole, or cannot become so any more. Text that may begin a
    stop string is held back until that is decided.

    Attributes:
        stopped: a stop string was found. It and everything after it are left out.
    """

    __slots__ = ("_held", "_ids", "_read", "_shown", "_skips", "_stops", "_tokenizer", "_window", "stopped")

    def __init__(
        self, tokenizer: ChatTokenizer, stops: Sequence[str] = (), *, skips_special: bool = True
    ) -> None:
        """`skips_special`: special tokens have no text."""
        self._tokenizer = tokenizer
        self._skips = skips_special
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._window = 0  # first id of the window
        self._read = 0  # the text of the ids before it has been returned
        self._shown = ""  # text of window..read
        self._held = ""  # text that may yet be the start of a stop string
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that is certain once this token is known: often "", never part of a stop string."""
        self._ids.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_UNFINISHED):
            return self._release(self._before_unfinished(text))
        return self._release(self._advance(text)) if len(text) > len(self._shown) else ""

    def finish(self) -> str:
        """The text held back, after the last token."""
        if self.stopped:
            return ""
        text = self._decode(self._window)
        held = self._release(text[len(self._shown) :]) + self._held
        self._held = ""
        self._shown = text
        return held

    def _decode(self, start: int) -> str:
        return self._tokens_text(start, len(self._ids))

    def _tokens_text(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skips)

    def _advance(self, text: str) -> str:
        """Moves the window to the tokens of the last piece; returns the new text."""
        new = text[len(self._shown) :]
        self._window, self._read = self._read, len(self._ids)
        self._shown = self._decode(self._window)
        return new

    def _before_unfinished(self, text: str) -> str:
        """Moves the window to the last tokens, of which one begins a character; returns the new text before
        that one. "" as long as few tokens are held back, or none of them begins a character."""
        if len(self._ids) - self._read < 2 * _MOST_TOKENS:
            return ""
        after = self._decode(self._read)
        for cut in range(len(self._ids) - _MOST_TOKENS, len(self._ids) - 2 * _MOST_TOKENS, -1):
            known = self._tokens_text(self._window, cut)
            shown = self._tokens_text(self._read, cut)
            if text.startswith(known) and after == shown + text[len(known) :]:
                new = known[len(self._shown) :]
                self._window, self._read, self._shown = self._read, cut, shown
                return new
        return ""

    def _release(self, new: str) -> str:
        """The text up to a stop string, or up to where one may begin."""
        if not self._stops or self.stopped:
            return "" if self.stopped else new
        text = self._held + new
        found = [at for at in map(text.find, self._stops) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max(held_back(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def held_back(text: str, mark: str) -> int:
    """Length of the longest end of `text` with which `mark` may begin: 0 to `len(mark) - 1`."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(mark[:length])), 0)
