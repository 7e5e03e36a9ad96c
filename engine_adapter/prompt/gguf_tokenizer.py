"""Reads the tokenizer and chat template of a GGUF file, as llama.cpp uses them: nothing is normalised.

Only byte-level BPE of the families below is read. Any other kind is refused, not approximated: the engine
that serves the model can tokenise instead.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MOST_BYTES = 256 << 20  # of one value: a length beyond it is damage


class GgufError(ValueError):
    """A file that is no GGUF, or a damaged one; the text says what is wrong with it."""


def read_metadata(path: Path) -> dict[str, Any]:
    """The entries at the head of a GGUF file by name: numbers, strings, and lists of them.

        "GGUF" · version (u32) · number of tensors (u64) · number of entries (u64) · entries
        entry: name (u64 length, bytes) · type (u32) · value

    All numbers are little-endian. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

    Raises:
        GgufError: it is not a GGUF that can be read.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise GgufError("it is no GGUF file")
        reader = _Reader(file)
        version = reader.number("I")
        if version not in _VERSIONS:
            raise GgufError(f"version {version} of GGUF is not known")
        reader.number("Q")
        entries = reader.number("Q")
        found = {}
        for _ in range(entries):
            name = reader.string()
            found[name] = reader.value()
        return found


@dataclass(frozen=True, slots=True)
class _Reader:
    _file: BinaryIO

    def number(self, code: str) -> Any:  # noqa: ANN401 - as the code has it
        return self._numbers(code, 1)[0]

    def string(self) -> str:
        """A string; bytes that are not UTF-8 are kept as surrogates."""
        return self._bytes(self.number("Q")).decode(errors="surrogateescape")

    def value(self) -> Any:  # noqa: ANN401 - as the file has it
        """A type, and a value of that type."""
        kind = self.number("I")
        if kind != _ARRAY:
            return self._reader_of(kind)(1)[0]
        item = self.number("I")
        return self._reader_of(item)(self.number("Q"))

    def _reader_of(self, kind: int) -> Callable[[int], list[Any]]:
        if kind == _STRING:
            return lambda count: [self.string() for _ in range(count)]
        code = _NUMBERS.get(kind)
        if code is None:
            raise GgufError(f"type {kind} of a value is not known")
        return lambda count: self._numbers(code, count)

    def _numbers(self, code: str, count: int) -> list[Any]:
        size = struct.calcsize(f"<{code}")
        return list(struct.unpack(f"<{count}{code}", self._bytes(count * size)))

    def _bytes(self, length: int) -> bytes:
        raw = self._file.read(length) if length <= _MOST_BYTES else b""
        if len(raw) != length:
            raise GgufError("the file ends within its metadata")
        return raw


# --- letters --------------------------------------------------------------------------------------------
#
# llama.cpp knows the letters, digits and marks of Unicode 15.1; tokenizers and fastokens know those of
# Unicode 16, and split a text with one of the 4,433 new ones elsewhere.
#
#     old_classes     \p{L} becomes [\p{L}&&[^…]], which tokenizers follows exactly
#     plain_classes   and back: fastokens is 20 times as fast with the plain classes, so it gets them, and
#     has_new         texts with a new letter go to the slower encoder

# Ranges may hold what Unicode does not assign: that is no letter anyway.
_NEW = (
    "\u0897\u1c89-\u1c8a\ua7cb-\ua7cd\ua7da-\ua7dc\U000105c0-\U000105f3\U00010d40-\U00010d85"
    "\U00010ec2-\U00010ec4\U00010efc\U00011380-\U000113e2\U000116d0-\U000116e3\U00011bc0-\U00011bf9"
    "\U00011f5a\U00013460-\U000143fa\U00016100-\U00016139\U00016d40-\U00016d79\U00018cff"
    "\U0001ccf0-\U0001ccf9\U0001e5d0-\U0001e5fa"
)
_CLASSES = [(rf"\p{{{kind}}}", rf"[\p{{{kind}}}&&[^{_NEW}]]") for kind in "LNM"]
# In UTF-8, the first bytes of the ranges: far faster to search than the ranges.
_BEGINNINGS = (b"\xe0\xa2", b"\xe1\xb2", b"\xea\x9f")
_FOUR_BYTES = re.compile(rb"\xf0[\x90-\x9c\x9e]")


def old_classes(pattern: str) -> str:
    """The regular expression with the classes of Unicode 15.1."""
    for plain, old in _CLASSES:
        pattern = pattern.replace(plain, old)
    return pattern


def plain_classes(description: str) -> str:
    """A `tokenizer.json` whose expressions have their plain classes again."""
    for plain, old in _CLASSES:
        description = description.replace(old.replace("\\", "\\\\"), plain.replace("\\", "\\\\"))
    return description


def has_new(text: str) -> bool:
    """True if a text has one of the new letters. Of a few other rare letters, too."""
    if text.isascii():
        return False
    raw = text.encode(errors="surrogatepass")
    return any(each in raw for each in _BEGINNINGS) or _FOUR_BYTES.search(raw) is not None


# --- tokenizers -----------------------------------------------------------------------------------------

_KEYS = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # kinds of tokens that are matched in a text first


@dataclass(frozen=True, slots=True)
class _Family:
    """A family of tokenizers: the way a text is split before pairs are merged, and the family's defaults.

    Attributes:
        takes_whole: a piece that is a token stays one token, even if the merges would split it.
        adds_bos: the BOS token is put before a text, unless the file says otherwise.
    """

    pattern: str
    takes_whole: bool = False
    adds_bos: bool = False


_GPT2 = _Family(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
_LLAMA3 = _Family(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    takes_whole=True,
    adds_bos=True,
)
_QWEN2 = _Family(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = _Family(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FAMILIES = {
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
}  # fmt: skip


def load_gguf_tokenizer(path: Path) -> Any:  # noqa: ANN401 - transformers is untyped
    """The transformers tokenizer of the GGUF at `path`. Library errors on a damaged file pass through. Raises
    GgufError: it is not a GGUF, or has no tokenizer, or one of another kind; OSError: it cannot be read."""
    metadata = read_metadata(path)
    found = {name.removeprefix(_KEYS): value for name, value in metadata.items() if name.startswith(_KEYS)}
    missing = [name for name in ("model", "tokens", "token_type") if name not in found]
    if missing:
        raise GgufError(f"it has no {_KEYS}{missing[0]}")
    kind, cut = found["model"], found.get("pre")
    if kind != "gpt2" or cut not in _FAMILIES:
        raise GgufError(
            f"its kind, {kind!r} with {cut!r}, cannot be read; known: 'gpt2' with {', '.join(_FAMILIES)}"
        )
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - slow to import, needed here alone

    names = {
        f"{name}_token": found["tokens"][found[f"{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        if f"{key}_token_id" in found
    }
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=_make_bpe(found, _FAMILIES[cut]),
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **names,
    )


def _make_bpe(found: Mapping[str, Any], family: _Family) -> Any:  # noqa: ANN401 - for transformers
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    tokens: list[str] = found["tokens"]
    merges = [merge.partition(" ")[::2] for merge in found.get("merges", ())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    bpe = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=family.takes_whole))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(old_classes(family.pattern)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
            for token, kind in zip(tokens, found["token_type"], strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    bpe.post_processor = _ends(found, family)
    return bpe


def _ends(found: Mapping[str, Any], family: _Family) -> Any:  # noqa: ANN401 - for tokenizers
    """Adds a first and a last token to a text, where the file asks for them."""
    from tokenizers import processors  # noqa: PLC0415 - see load_gguf_tokenizer

    tokens = found["tokens"]
    first = [found["bos_token_id"]] if found.get("add_bos_token", family.adds_bos) else []
    last = [found["eos_token_id"]] if found.get("add_eos_token", False) else []
    return processors.TemplateProcessing(
        single=[*(tokens[index] for index in first), "$A", *(tokens[index] for index in last)],
        special_tokens=[(tokens[index], index) for index in {*first, *last}],
    )
