"""Text → token ids, exactly as transformers: the fastest encoder, where a text can be cut, and what is too
long."""

from __future__ import annotations

import os
import random
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol

import fastokens  # type: ignore[import-untyped]  # a Rust module without py.typed
import msgspec
from typing_extensions import override

from engine_adapter.errors import ChatError
from engine_adapter.prompt.gguf_tokenizer import has_new, plain_classes
from engine_adapter.types import TokenIds

if TYPE_CHECKING:
    from engine_adapter.prompt.chat import ChatTokenizer


# --- places where a text can be cut so that its pieces, encoded alone, give the ids of the whole --------
# A tokenizer first finds its added tokens in the text, from left to right. It then normalises, splits and
# encodes what lies between two of them without a look at the rest. So a text can be cut before an added
# token that is found there whatever surrounds it. `cut_tokens` proves this from the tokenizer's list of
# added tokens. `find_cut` picks one that chats contain, and compares cut and whole texts as well.


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
    alone as a word, because then its neighbours decide."""
    tokens = [token for token in added if token.content]
    if any(token.single_word for token in tokens):
        return ()
    return tuple(
        token.content
        for token in tokens
        if not (token.normalized or token.lstrip or token.content[0].isspace())
        and not any(_hides(other.content, token.content) for other in tokens)
    )


def _hides(other: str, cut: str) -> bool:
    """True if an occurrence of `other` can hide one of `cut`: `other` is longer and begins with `cut`, or it
    begins further left and overlaps it."""
    ends = (other[start:] for start in range(1, len(other)))
    is_longer = other != cut and other.startswith(cut)
    return is_longer or any(cut.startswith(end) or end.startswith(cut) for end in ends)


def find_cut(tokenizer: ChatTokenizer) -> str | None:
    """The added token before which this tokenizer's chats are cut; None if they must be encoded whole.

    It is the one that the chat template writes most often."""
    try:
        text = tokenizer.render(_CHAT)
    except ChatError:
        return None
    # A token that only begins the chat cuts nothing off.
    found = [token for token in tokenizer.encoder.cuts if text.rfind(token) > 0]
    cut = max(found, key=text.count, default=None)
    return cut if cut is not None and _is_exact(tokenizer, cut, text) else None


def _is_exact(tokenizer: ChatTokenizer, cut: str, chat: str) -> bool:
    """True if texts cut before `cut`, which stands between all kinds of neighbours, give the ids of the whole
    texts."""
    neighbours = tokenizer.encoder.cuts[:_NEIGHBOURS]
    pairs = product((*_ENDS, *neighbours), (*_STARTS, *neighbours))
    for text in (chat, *(f"{end}{cut}{start}" for end, start in pairs)):
        head, *tails = text.split(cut)
        ids = array("i")
        for piece in (head, *(cut + tail for tail in tails)):
            ids += tokenizer.encode(piece, add_special_tokens=False)
        if ids != tokenizer.encode(text, add_special_tokens=False):
            return False
    return True


# --- refuses texts that cannot fit into a context, with as little work as possible ----------------------
# A text of too many characters fits into no context. A shorter one that is still long for the context is
# first encoded in pieces, until they have too many tokens. So the context bounds what a text costs, not its
# length.

MAX_CHARS_PER_TOKEN = 256
"""No tokenizer has longer tokens on average: a longer text cannot fit."""
# Texts with fewer characters for each token of the context are encoded at once: most text has three to six.
_USUAL_CHARS_PER_TOKEN = 8
_PIECE_CHARS = 64 << 10
# Pieces of a text have more tokens than the whole: a few at each cut, surely not so many more.
_OF_CUTS = 1.25


class CannotFit(Exception):
    """A text is longer than its context. `tokens`: it has at least as many."""

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


# --- picks the fastest encoder that gives exactly the token ids of transformers -------------------------
#     fastokens      ten times as fast as tokenizers
#     tokenizers     the Rust library behind transformers
#     transformers   the tokenizer's own class
#
# The three are not guaranteed to agree. When a tokenizer is loaded, the faster two are compared with
# transformers on test texts, and the fastest one that agrees on all of them is used. The proxy does this in a
# second process (tokenizer_process.py) and builds only the one that was found.

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
        cuts: added tokens before which a text can be cut, see `cut_tokens`.
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
        that llama.cpp does not know. With `split_special_tokens`, special tokens in a text are encoded as
        text."""
        self._slower, self._split_special_tokens = slower, split_special_tokens
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
