"""Turns generated tokens into text, piece by piece, and watches for stop strings."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

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


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"  # how SentencePiece writes a space


class TokenBytes:
    """The bytes of each token of a vocabulary, as it stands inside a text."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        backend: Any = tokenizer.transformers
        decoder = getattr(getattr(backend, "backend_tokenizer", None), "decoder", None)
        state: bytes = decoder.__getstate__() if decoder is not None else b""
        self._is_byte_level = b'"ByteLevel"' in state
        self._is_sentencepiece = _SPACE.encode() in state or b'"Metaspace"' in state
        self._added = frozenset(backend.added_tokens_decoder)

    def of(self, token_id: int) -> bytes:
        """A token's bytes; none for an id outside the vocabulary."""
        if not 0 <= token_id < self._tokenizer.vocab_size:
            return b""
        if token_id not in self._added:
            name: str | None = self._tokenizer.transformers.convert_ids_to_tokens(token_id)
            if name is None:
                return b""
            if self._is_byte_level and (found := _from_byte_level(name)) is not None:
                return found
            if self._is_sentencepiece:
                byte = _BYTE.fullmatch(name)
                return bytes.fromhex(byte[1]) if byte else name.replace(_SPACE, " ").encode()
        return self._tokenizer.decode([token_id]).encode()


class TextOffsets:
    """Where tokens begin in a text, in characters. A token inside a character begins where that does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def next(self, token: bytes) -> int:
        """The offset of the next token."""
        offset = self._offset
        self._offset += len(self._decoder.decode(token))
        return offset


def shown(token: bytes) -> str:
    r"""A token as text. Bytes that are no character alone are written as OpenAI does: `\xf0\x9f`."""
    return token.decode("utf-8", "backslashreplace")


def _from_byte_level(name: str) -> bytes | None:
    """The bytes for which the characters of a byte-level token stand; None for another kind of token."""
    alphabet = _byte_alphabet()
    if not all(character in alphabet for character in name):
        return None
    return bytes(alphabet[character] for character in name)


@cache
def _byte_alphabet() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # noqa: PLC0415 - slow to import

    table: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    return {character: byte for byte, character in table.items()}
