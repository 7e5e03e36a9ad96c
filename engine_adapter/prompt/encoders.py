"""Picks the fastest encoder that gives exactly the token ids of transformers.

    fastokens      ten times as fast as tokenizers
    tokenizers     the Rust library behind transformers
    transformers   the tokenizer's own class

The three are not guaranteed to agree. When a tokenizer is loaded, the faster two are compared with
transformers on test texts, and the fastest one that agrees on all of them is used. The proxy does this in a
second process (tokenizer_process.py) and builds only the one that was found.
"""

from __future__ import annotations

import os
import random
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import fastokens  # type: ignore[import-untyped]  # a Rust module without py.typed
import msgspec
from typing_extensions import override

from engine_adapter.prompt.cuts import AddedToken, cut_tokens
from engine_adapter.prompt.gguf_tokenizer import has_new, plain_classes
from engine_adapter.types import TokenIds

# fastokens encodes in the calling thread. By default it has a helper thread for each other core, with caches
# of its own. With one of them, 126,000 tokens took 1.9 ms of CPU instead of 1.4, which is other requests'
# time. fastokens reads this when it first encodes.
os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")

_TEXTS = (
    "Hello, world!",
    " leading and trailing ",
    "zażółć 漢字 🙂\n\n\t<|x|>",
    "def f(x):\n    return 1234567",
    "I'll WE'LL it's IT'S don't 'tis",
    "   \n \n\n\r\n\t\t  x   ",
    "1,234.56 ½ Ⅷ ٣٤ 百 x² H₂O",
    "İstanbul ſtraße ﬁn Ǆ Å Å e\u0301 ҈ हिन्दी ไทย 한국어 ﷺ",
    "👩\u200d👩\u200d👧 🏳️\u200d🌈 \ufeff\u200b\u00a0\u3000\x00\x7f",
    "https://example.org/a?b=c&d=%20#e snake_case camelCase -> != ... ——",
    "a" * 300 + " " * 300 + "\n" * 50,
)
_PIECES = (
    *"aBé漢🙂Ωßก१٣½7 \t\n\r_-.<>|'\"/\\",
    *("  ", "\r\n", "e\u0301", "\u0300", "\u200d", "\ufe0f", "\u00a0", "\u3000", "\ufeff", "\x00", "ﬁ", "İ"),
    *("the", " the", "ing", "'s", "'LL", "123", "...", "</s>", "<|im_start|>", "def ", "    ", "한국"),
)
_PROBE_IDS, _PROBE_MIXES, _MIX_PIECES = 4096, 200, 12


class Encoder(Protocol):
    """Makes token ids of text.

    Attributes:
        name: the library.
        chars_per_ms: length of a text that takes about 1 ms.
        cuts: added tokens before which a text can be cut, see cuts.py.
    """

    name: str
    chars_per_ms: int
    cuts: tuple[str, ...]

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds[int]:
        """Token ids of `text`. Thread-safe."""


class TransformersEncoder(Encoder):
    """The tokenizer's own `encode`: the reference, and the only encoder of tokenizers written in Python."""

    name = "transformers"
    chars_per_ms = 1024
    cuts: tuple[str, ...] = ()  # a tokenizer written in Python may do anything

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 - transformers is untyped
        self._tokenizer = tokenizer

    @override
    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds[int]:
        return array("i", self._tokenizer.encode(text, add_special_tokens=add_special_tokens))


class TokenizersEncoder(Encoder):
    """The Rust tokenizer behind a transformers one; neither pads nor truncates. Releases the GIL."""

    name = "tokenizers"
    chars_per_ms = 4096

    def __init__(self, backend: Any) -> None:  # noqa: ANN401 - tokenizers is untyped
        self._backend = backend
        added = () if backend.encode_special_tokens else backend.get_added_tokens_decoder().values()
        self.cuts = cut_tokens(msgspec.convert(each, AddedToken, from_attributes=True) for each in added)

    @override
    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds[int]:
        encodings = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("i", encodings[0].ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of ids of the vocabulary."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


class FastokensEncoder(Encoder):
    """fastokens. Releases the GIL."""

    name = "fastokens"
    chars_per_ms = 32_768

    def __init__(
        self, description: str, slower: Callable[[], Encoder], *, split_special_tokens: bool
    ) -> None:
        """Reads a `tokenizer.json`; raises ValueError for what fastokens does not implement.

        `slower` gives what encodes the rare text that exceeds fastokens' regular expressions, or has letters
        that llama.cpp does not know. With
        `split_special_tokens`, special tokens in a text are encoded as text.
        """
        self._slower = slower
        self._split_special_tokens = split_special_tokens
        plain = plain_classes(description)
        self._knows_new = plain == description
        self._tokenizer = fastokens.Tokenizer.from_json_str(plain)
        added = [] if split_special_tokens else self._tokenizer.added_tokens()
        self.cuts = cut_tokens(msgspec.convert(added, list[AddedToken]))

    @override
    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds[int]:
        if not self._knows_new and has_new(text):
            return self._slower().encode(text, add_special_tokens=add_special_tokens)
        try:
            raw, _ = self._tokenizer.encode_batch_flat([text], add_special_tokens, self._split_special_tokens)
        except ValueError:
            return self._slower().encode(text, add_special_tokens=add_special_tokens)
        token_ids = array("i", raw)
        if sys.byteorder == "big":
            token_ids.byteswap()
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of ids of the vocabulary; not compared with transformers, see `describe`."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens)
        return text


def exact_encoder(tokenizer: Any) -> Encoder:  # noqa: ANN401 - transformers is untyped
    """The fastest encoder that gives what `tokenizer`, of transformers, gives."""
    reference = TransformersEncoder(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "encode_batch_fast"):
        return reference
    backend.no_truncation()
    backend.no_padding()
    split = backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
    plain = TokenizersEncoder(backend)
    probes = [
        (text, special, reference.encode(text, add_special_tokens=special))
        for text in _probes(tokenizer)
        for special in (True, False)
    ]
    if not _agrees(plain, probes):
        return reference
    try:
        fast = FastokensEncoder(backend.to_str(), lambda: plain, split_special_tokens=split)
    except ValueError:
        return plain
    return fast if _agrees(fast, probes) else plain


def _agrees(encoder: Encoder, probes: list[tuple[str, bool, TokenIds[int]]]) -> bool:
    return all(encoder.encode(text, add_special_tokens=special) == ids for text, special, ids in probes)


def _probes(tokenizer: Any) -> Iterator[str]:  # noqa: ANN401 - transformers is untyped
    """Texts that show differences between encoders; always the same ones for a tokenizer."""
    yield from _TEXTS
    added = list(tokenizer.get_added_vocab())[:64]
    for token in added:
        yield f"a{token}b"
        yield f"a {token} \n{token}{token} "
    size = len(tokenizer)
    # Words of the whole vocabulary side by side, as in no real text: new pairs to merge.
    yield tokenizer.decode(range(0, size, max(size // _PROBE_IDS, 1)), clean_up_tokenization_spaces=False)
    mixed = random.Random(0)  # noqa: S311 - the same texts each time
    for _ in range(_PROBE_MIXES):
        yield "".join(mixed.choices((*_PIECES, *added), k=_MIX_PIECES))
