"""A tokenizer of the size that served models have, made once from the standard library: no hub is needed."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

from harness import CACHE, ROOT
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

# As many entries as Qwen2.5 has, and its chat template (Qwen/Qwen2.5-7B-Instruct, Apache-2.0).
QWEN_ENTRIES = 151_665
QWEN_TEMPLATE = Path(__file__).with_name("qwen2_5_chat_template.jinja")
DEFAULT_MODEL = ROOT / "engine_adapter" / "torch_engine" / "default_model"
LONGEST_DRAWN = 14
# Qwen2's way of cutting text into words.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def sources() -> list[str]:
    """Texts to talk about, at hand everywhere: the standard library."""
    paths = sorted(Path(os.__file__).parent.rglob("*.py"))
    own = [path for path in paths if not {"test", "site-packages"}.intersection(path.parts)]
    return [path.read_text(encoding="utf-8", errors="replace") for path in own]


def large_tokenizer(entries: int, template: Path = DEFAULT_MODEL / "chat_template.jinja") -> Path:
    """The directory of a byte-level BPE tokenizer with `entries` tokens; made on first use.

    The standard library gives some 80,000 entries. What is missing then is drawn at random: text hardly ever
    uses it, but it takes the memory and the look-ups of a full vocabulary.
    """
    directory = CACHE / f"tokenizer-{entries}"
    if not (directory / "tokenizer.json").exists():
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - needed once

        bpe = _filled(_trained(entries), entries)
        text = template.read_text(encoding="utf-8")
        PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=text).save_pretrained(directory)
    return directory


def _trained(entries: int) -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), behavior="isolated"), byte_level]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(sources(), trainer)
    return bpe


def _filled(bpe: Tokenizer, entries: int) -> Tokenizer:
    """The tokenizer with merges of random pairs until it has `entries` tokens."""
    tokenizer = json.loads(bpe.to_str())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    added = {token["content"] for token in tokenizer["added_tokens"]}
    pieces = [token for token in vocabulary if token not in added]
    draw = random.Random(0)  # noqa: S311 - the same tokenizer each time
    while len(vocabulary) < entries:
        left, right = draw.choice(pieces), draw.choice(pieces)
        merged = left + right
        if len(merged) <= LONGEST_DRAWN and merged not in vocabulary:
            vocabulary[merged] = len(vocabulary)
            merges.append([left, right])
    return Tokenizer.from_str(json.dumps(tokenizer))
