"""The bytes of single tokens. A character may consist of several tokens, none of which is text alone."""

from __future__ import annotations

import codecs
import re
from functools import cache
from typing import Any

from engine_adapter.prompt.chat import ChatTokenizer

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
