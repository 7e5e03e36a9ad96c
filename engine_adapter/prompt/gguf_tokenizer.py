"""Reads the tokenizer and chat template of a GGUF file, as llama.cpp uses them: nothing is normalised.

Only byte-level BPE of the families below is read. Any other kind is refused, not approximated: the engine
that serves the model can tokenise instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_adapter.prompt.gguf_metadata import GgufError, read_metadata

_KEYS = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # kinds of tokens that are matched in a text first


@dataclass(frozen=True, slots=True)
class _Family:
    """A family of tokenizers: the way a text is split before pairs are merged, and the family's defaults.

    Attributes:
        pattern: matches the pieces.
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
    """The transformers tokenizer of the GGUF at `path`. Library errors on a damaged file pass through.

    Raises:
        GgufError: it is not a GGUF, or has no tokenizer, or one of another kind.
        OSError: it cannot be read.
    """
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
    return _make(found, _FAMILIES[cut], metadata.get("tokenizer.chat_template"))


def _make(found: Mapping[str, Any], family: _Family, template: str | None) -> Any:  # noqa: ANN401 - untyped
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - slow to import, needed here alone

    names = {
        f"{name}_token": found["tokens"][found[f"{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        if f"{key}_token_id" in found
    }
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=_make_bpe(found, family),
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **names,
    )


def _make_bpe(found: Mapping[str, Any], family: _Family) -> Any:  # noqa: ANN401 - for transformers
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    tokens: list[str] = found["tokens"]
    merges = [_pair(merge) for merge in found.get("merges", ())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    bpe = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=family.takes_whole))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(family.pattern), "isolated"),
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
    from tokenizers import processors  # noqa: PLC0415 - see _make

    tokens = found["tokens"]
    first = [found["bos_token_id"]] if found.get("add_bos_token", family.adds_bos) else []
    last = [found["eos_token_id"]] if found.get("add_eos_token", False) else []
    return processors.TemplateProcessing(
        single=[*(tokens[index] for index in first), "$A", *(tokens[index] for index in last)],
        special_tokens=[(tokens[index], index) for index in {*first, *last}],
    )


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
