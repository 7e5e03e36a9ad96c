"""A tokenizer put together from its description, without transformers' loader and what that takes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import msgspec

from engine_adapter.prompt.encoders import Encoder, TransformersEncoder, exact_encoder, make_encoder


class Description(msgspec.Struct, frozen=True, tag=True):
    """All that makes a tokenizer.

    Attributes:
        encoder: the fastest encoder that gives the ids of transformers, see encoders.py.
        tokenizer: a `tokenizer.json`; None where only transformers itself gives the right ids.
        splits_special: special tokens in a text are encoded as text.
        chat_template: the template, or several by name.
        special_tokens: special tokens by role, e.g. `eos_token`, as templates read them.
    """

    encoder: str
    tokenizer: str | None = None
    splits_special: bool = False
    chat_template: str | dict[str, str] | None = None
    special_tokens: dict[str, Any] = {}


def describe(tokenizer: Any) -> Description:  # noqa: ANN401 - transformers is untyped
    """The description of a transformers tokenizer."""
    encoder = exact_encoder(tokenizer)
    if isinstance(encoder, TransformersEncoder):
        return Description(encoder.name)
    return Description(
        encoder=encoder.name,
        tokenizer=tokenizer.backend_tokenizer.to_str(),
        splits_special=bool(tokenizer.split_special_tokens),
        chat_template=tokenizer.chat_template,
        special_tokens=dict(tokenizer.special_tokens_map),
    )


class DescribedTokenizer:
    """The part of a transformers tokenizer that `ChatTokenizer` uses. transformers renders its templates.

    Attributes:
        encoder: encodes.
        chat_template, special_tokens_map: read by transformers.
        eos_token_id: the id that ends a text, where the tokenizer names one.
    """

    def __init__(self, description: Description) -> None:
        """Takes a second for 150,000 entries: call it in a thread."""
        from tokenizers import Tokenizer  # noqa: PLC0415 - not imported before it is needed

        self.chat_template = description.chat_template
        self.special_tokens_map = description.special_tokens
        self._backend = Tokenizer.from_str(description.tokenizer or "")
        self._backend.encode_special_tokens = description.splits_special
        give_back_memory()
        self.encoder: Encoder = make_encoder(description.encoder, self._backend, description.tokenizer or "")
        _transformers()
        give_back_memory()
        eos = self.special_tokens_map.get("eos_token")
        self.eos_token_id: int | None = None if eos is None else self._backend.token_to_id(eos)

    def __len__(self) -> int:
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        return size

    def decode(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,  # noqa: ARG002 - as transformers has it
    ) -> str:
        """Text of `token_ids`, nothing cleaned up."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:  # noqa: ANN401
        """See transformers' method of that name."""
        template: str = _transformers().get_chat_template(self, chat_template, tools)
        return template

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> str:  # noqa: ANN401
        """See transformers' method of that name."""
        text: str = _transformers().apply_chat_template(self, conversation, **options)
        return text


def _transformers() -> Any:  # noqa: ANN401 - transformers is untyped
    """The class that renders templates; it loads nothing and imports no torch."""
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase  # noqa: PLC0415 - see above

    return PreTrainedTokenizerBase


def give_back_memory() -> None:
    """Returns freed memory to the system, which glibc keeps after many small pieces."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
