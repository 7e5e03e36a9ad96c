"""A tokenizer put together from its description, without transformers' loader and what that takes.

`describe` makes the description, in the process that loads the tokenizer. `DescribedTokenizer` is what the
proxy keeps: one encoder, and the templates.
"""

from __future__ import annotations

import ctypes
import random
import zlib
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import msgspec

from engine_adapter.prompt.encoders import (
    Encoder,
    FastokensEncoder,
    TokenizersEncoder,
    TransformersEncoder,
    exact_encoder,
)

_DECODED = 200


class Description(msgspec.Struct, frozen=True, tag=True):
    """All that makes a tokenizer.

    Attributes:
        encoder: the fastest encoder that gives the ids of transformers, see encoders.py.
        tokenizer: a `tokenizer.json`, compressed by zlib; None where only transformers itself is right.
        splits_special: special tokens in a text are encoded as text.
        decodes: the encoder also decodes as transformers does.
        vocab_size: ids the tokenizer knows, added tokens included.
        eos_token_id: the id that ends a text, where the tokenizer names one.
        chat_template: the template, or several by name.
        special_tokens: special tokens by role, e.g. `eos_token`, as templates read them.
    """

    encoder: str
    tokenizer: bytes | None = None
    splits_special: bool = False
    decodes: bool = False
    vocab_size: int = 0
    eos_token_id: int | None = None
    chat_template: str | dict[str, str] | None = None
    special_tokens: dict[str, Any] = {}


def describe(tokenizer: Any) -> Description:  # noqa: ANN401 - transformers is untyped
    """The description of a transformers tokenizer."""
    encoder = exact_encoder(tokenizer)
    if isinstance(encoder, TransformersEncoder):
        return Description(encoder.name)
    return Description(
        encoder=encoder.name,
        tokenizer=zlib.compress(tokenizer.backend_tokenizer.to_str().encode()),
        splits_special=bool(tokenizer.split_special_tokens),
        decodes=isinstance(encoder, FastokensEncoder | TokenizersEncoder) and _decodes(encoder, tokenizer),
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        chat_template=tokenizer.chat_template,
        special_tokens=dict(tokenizer.special_tokens_map),
    )


def _decodes(encoder: FastokensEncoder | TokenizersEncoder, tokenizer: Any) -> bool:  # noqa: ANN401 - as above
    """True if random ids, with broken characters and special tokens among them, give the same text."""
    draw = random.Random(0)  # noqa: S311 - the same ids each time
    for _ in range(_DECODED):
        ids = [draw.randrange(len(tokenizer)) for _ in range(draw.randrange(1, 40))]
        for skip in (True, False):
            theirs = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            if encoder.decode(ids, skip_special_tokens=skip) != theirs:
                return False
    return True


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool

    def __str__(self) -> str:
        return self.content


class _AddedTokens(msgspec.Struct):
    """The part of a `tokenizer.json` that lists the added tokens."""

    added_tokens: list[_AddedToken]


class DescribedTokenizer:
    """The part of a transformers tokenizer that `ChatTokenizer` uses."""

    def __init__(self, description: Description) -> None:
        """Takes seconds for 150,000 entries: call it in a thread.

        fastokens releases the GIL meanwhile; tokenizers holds it for 0.7 s."""
        self.chat_template = description.chat_template
        self.special_tokens_map = description.special_tokens
        self.eos_token_id = description.eos_token_id
        self._description = description
        self.encoder: Encoder = self._fast if description.encoder == FastokensEncoder.name else self._plain
        give_back_memory()

    def __len__(self) -> int:
        return self._description.vocab_size

    @cached_property
    def added_tokens_decoder(self) -> dict[int, _AddedToken]:
        """Added tokens by id."""
        tokens = msgspec.json.decode(self._json(), type=_AddedTokens).added_tokens
        return {token.id: token for token in tokens}

    @cached_property
    def _fast(self) -> FastokensEncoder:
        return FastokensEncoder(
            self._json(), lambda: self._plain, split_special_tokens=self._description.splits_special
        )

    @cached_property
    def _plain(self) -> TokenizersEncoder:
        """Made on its first use: with fastokens, for a text or ids that it does not do as transformers."""
        from tokenizers import Tokenizer  # noqa: PLC0415 - not imported before it is needed

        backend = Tokenizer.from_str(self._json())
        backend.encode_special_tokens = self._description.splits_special
        return TokenizersEncoder(backend)

    def _json(self) -> str:
        return zlib.decompress(self._description.tokenizer or b"").decode()

    def decode(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,  # noqa: ARG002 - as transformers has it
    ) -> str:
        """Text of `token_ids`, nothing cleaned up."""
        is_fast = self._description.decodes and isinstance(self.encoder, FastokensEncoder)
        decoder = self._fast if is_fast else self._plain
        return decoder.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def give_back_memory() -> None:
    """Returns freed memory to the system, which glibc keeps after many small pieces."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
