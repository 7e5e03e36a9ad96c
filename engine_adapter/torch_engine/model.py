"""Loads a model from a directory or a hub id, or makes the built-in one; checks that it runs here.

The check: two short sequences run as the engine would run them, in chunks, together, over shared blocks, one
token given by its embedding. The same sequences run in one pass each with transformers' own eager attention
and no cache. The comparison of the logits finds what no configuration shows, for example rotary factors that
depend on the longest position in the batch.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from engine_adapter.errors import EngineSpecError
from engine_adapter.torch_engine.attention import (
    IMPLEMENTATION,
    KvStorage,
    LayerShape,
    PagedBatch,
    Part,
    Probe,
    Scratch,
    attention_context,
)
from engine_adapter.torch_engine.kv_cache import KvSequence
from engine_adapter.torch_engine.requests import NoScores, RequestRefused

_log = logging.getLogger("kvpin.engine")
DEFAULT_MODEL = Path(__file__).parent / "default_model"
DEFAULT_NAME = "kvpin-tiny"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_UNRUNNABLE = (TypeError, LookupError, ValueError, AttributeError, RuntimeError)
_ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "attention"})
_BLOCK = 4
# Tokens: of the short sequence, shared by both sequences, of the long sequence.
_NEAR, _SHARED, _LONG = 12, 8, 24
_EXTRA_ID = 1
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Largest deviation allowed, as a share of the logits' spread. Rounding stays well below it."""


# --- a loaded model, and one forward pass of it: tokens of many sequences in, logits out ----------------

Ints = NDArray[np.int64]

PADDING_TOKENS = 256
"""Most tokens of padding in a call for several sequences. To attend so many costs about what a call costs."""
CALL_BYTES = 4 << 20
"""Most KV that a call for several sequences gathers. More would not stay in a CPU's own cache."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model, ready to run."""

    module: Any
    name: str
    tokenizer: str  # absolute directory or hub id of the tokenizer
    vocab_size: int  # token ids below it are text
    hidden_size: int  # columns of an embedding
    max_model_len: int  # context in tokens
    eos_token_ids: frozenset[int]
    default_max_tokens: int | None  # limit of the generation config; None if it has none
    # device, dtype: as torch names them, e.g. `cpu`, `float32`.
    device: str
    dtype: str
    layers: tuple[LayerShape, ...]
    is_default: bool  # True for the built-in random-weight model

    def block_bytes(self, tokens_per_block: int) -> int:
        """Bytes of one KV block."""
        values = sum(layer.heads * (layer.key_dim + layer.value_dim) for layer in self.layers)
        dtype: torch.dtype = getattr(torch, self.dtype)
        return values * dtype.itemsize * tokens_per_block


class _Rows(NamedTuple):
    """The rows of a step, a row for each token."""

    # counts, ends, lengths: of each item: its rows, where they end, its tokens after the step.
    counts: Ints
    ends: Ints
    lengths: Ints
    tables: list[Ints]  # the block ids of each item
    # positions, slots: of each row: its place in the sequence and in the KV.
    positions: Ints
    slots: Ints


class Runner:
    """Runs a model over paged KV. Writes only to reserved blocks."""

    def __init__(self, model: LoadedModel, storage: KvStorage, tokens_per_block: int) -> None:
        self._module = model.module
        self._embed = model.module.get_input_embeddings()
        self._vocab_size = model.vocab_size
        self._device = torch.device(model.device)
        self._layers = storage.layers
        self._size = tokens_per_block
        self._scratch = Scratch(tokens_per_block)
        self._most_blocks = CALL_BYTES * len(model.layers) // model.block_bytes(tokens_per_block)

    @torch.inference_mode()
    def run(self, work: Sequence[KvSequence]) -> Tensor:
        """Logits [tokens after which they are needed, vocabulary], in order. Neighbours in `work` with a
        single token each and similar lengths are attended in one call. Raises NoScores if the model computes
        what is no number."""
        rows = self._rows(work)
        needed = np.array([item.logits for item in work], dtype=np.int64)
        wanted = np.arange(needed.sum()) + (rows.ends - needed.cumsum()).repeat(needed)
        parts = [self._part(rows, first, last) for first, last in self._groups(rows)]
        batch = PagedBatch(self._layers, self._to_device(rows.slots), parts, self._scratch)
        with attention_context(batch):
            output = self._module(
                **self._inputs(work),
                position_ids=self._to_device(rows.positions)[None],
                use_cache=False,
                logits_to_keep=self._to_device(wanted),
            )
        if not torch.stack(batch.sums).isfinite().all():
            raise NoScores("the model computes values that are no numbers")
        logits: Tensor = output.logits[0]
        return logits

    def run_with_hidden(self, work: Sequence[KvSequence]) -> tuple[Tensor, Tensor]:
        """The same, and the last hidden states [tokens, hidden] that the logits are made from. Raises
        RequestRefused if the model's logits are not made by one layer."""
        seen: list[Tensor] = []
        head = self._module.get_output_embeddings()
        if head is not None:
            with head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0])):
                logits = self.run(work)
        if len(seen) != 1:
            raise RequestRefused("this model gives no embeddings", param="model")
        return logits, seen[0]

    def _rows(self, work: Sequence[KvSequence]) -> _Rows:
        counts = np.array([item.count for item in work])
        lengths = np.array([item.computed for item in work]) + counts
        blocks = -(-lengths // self._size)
        tables = [
            np.array(item.blocks[:used], dtype=np.int64)
            for item, used in zip(work, blocks.tolist(), strict=True)
        ]
        ends = counts.cumsum()
        owners = np.repeat(np.arange(len(work)), counts)
        positions = np.arange(len(owners)) + (lengths - ends)[owners]
        places = positions // self._size + (blocks.cumsum() - blocks)[owners]
        slots = np.concatenate(tables)[places] * self._size + positions % self._size
        return _Rows(counts, ends, lengths, tables, positions, slots)

    def _part(self, rows: _Rows, first: int, last: int) -> Part:
        """The items `first` to `last`, which attend together."""
        begin, end = int(rows.ends[first] - rows.counts[first]), int(rows.ends[last])
        tables, lengths = rows.tables[first : last + 1], rows.lengths[first : last + 1]
        part = Part(begin, end, self._to_device(lengths), int(lengths.max()))
        if first == last and bool((np.diff(tables[0]) == 1).all()):
            part.start = int(tables[0][0]) * self._size
        else:
            blocks = np.zeros((len(tables), max(map(len, tables))), dtype=np.int64)
            for padded, table in zip(blocks, tables, strict=True):
                padded[: len(table)] = table
            part.blocks = self._to_device(blocks.ravel())
        return part

    def _groups(self, rows: _Rows) -> list[tuple[int, int]]:
        """The items that attend together, as first and last index: see `PADDING_TOKENS` and `CALL_BYTES`."""
        groups: list[tuple[int, int]] = []
        widest = used = 0  # blocks of the last group: of its longest sequence, of all
        single = rows.counts == 1
        together = (single[1:] & single[:-1]).tolist()
        for index, blocks in enumerate(map(len, rows.tables)):
            first = groups[-1][0] if groups else 0
            wide = max(widest, blocks) * (index - first + 1)
            if (
                groups
                and together[index - 1]
                and (wide - used - blocks) * self._size <= PADDING_TOKENS
                and wide <= self._most_blocks
            ):
                groups[-1] = first, index
                widest, used = max(widest, blocks), used + blocks
            else:
                groups.append((index, index))
                widest = used = blocks
        return groups

    def _inputs(self, work: Sequence[KvSequence]) -> dict[str, Tensor]:
        """`input_ids`, or `inputs_embeds` when the step has fake ids."""
        parts = [slice(item.computed, item.computed + item.count) for item in work]
        tokens = np.concatenate(
            [np.array(item.tokens[part], dtype=np.int64) for item, part in zip(work, parts, strict=True)]
        )
        fake = tokens >= self._vocab_size
        if not fake.any():
            return {"input_ids": self._to_device(tokens)[None]}
        embeds = self._embed(self._to_device(np.where(fake, 0, tokens)))
        begin = 0
        for item, part in zip(work, parts, strict=True):
            extras = np.array(() if item.extra_ids is None else item.extra_ids[part], dtype=np.uint64)
            for extra_id, rows in item.embeddings.items():
                at = begin + np.flatnonzero(extras == extra_id)
                at = at[fake[at]]
                given = rows[torch.from_numpy(tokens[at] - self._vocab_size)]
                embeds[self._to_device(at)] = given.to(device=embeds.device, dtype=embeds.dtype)
            begin += item.count
        return {"inputs_embeds": embeds[None]}

    def _to_device(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def first_line(error: BaseException) -> str:
    """What an error says, in one line: torch adds advice on debugging to errors of the device."""
    return str(error).partition("\n")[0]


# --- loading -------------------------------------------------------------------------------------------


def load_model(
    source: str | None, *, device: str = "cpu", dtype: str | None = None, served_name: str | None = None
) -> LoadedModel:
    """Loads a Hugging Face causal LM from a directory or hub id; None is `kvpin-tiny`. `dtype` None takes the
    checkpoint's. EngineSpecError says why it cannot be loaded, or why this engine cannot run it."""
    if dtype is not None and dtype not in DTYPES:
        raise EngineSpecError(f"dtype is {dtype!r}; one of {', '.join(DTYPES)} is needed")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise EngineSpecError(f"device is {device!r}, but torch finds no CUDA device")
    if source is None:
        module = random_model(AutoConfig.from_pretrained(DEFAULT_MODEL), 0, DTYPES[dtype or "float32"])
        module.generation_config = GenerationConfig.from_pretrained(DEFAULT_MODEL)
        name, tokenizer = DEFAULT_NAME, str(DEFAULT_MODEL)
    else:
        module = _from_source(source, "auto" if dtype is None else DTYPES[dtype])
        path = Path(source)
        tokenizer = str(path.resolve()) if path.is_dir() else source
        name = path.resolve().name if path.is_dir() else source
    try:
        module.eval().requires_grad_(False).to(device)
    except (RuntimeError, AssertionError) as error:  # no such device, no room on it, a torch without it
        raise EngineSpecError(
            f"cannot load model {name!r} to device {device!r}: {first_line(error)}"
        ) from error
    try:
        model = _describe(module, served_name or name, tokenizer, is_default=source is None)
        _log.info("checking that %s answers over paged KV as it does without", model.name)
        check_model(model)
    except (EngineSpecError, *_UNRUNNABLE) as error:
        fails = f"a forward pass over paged KV fails ({first_line(error)})"
        reason = str(error) if isinstance(error, EngineSpecError) else fails
        raise EngineSpecError(
            f"model {name!r} ({type(module).__name__}) cannot run here: {reason}"
        ) from error
    return model


def random_model(config: PretrainedConfig, seed: int, dtype: torch.dtype = torch.float32) -> Any:  # noqa: ANN401
    """A model whose weights depend on `seed` alone. Does not touch torch's own random state."""
    with torch.random.fork_rng(devices=[]):
        build: Any = AutoModelForCausalLM.from_config  # untyped in transformers
        module = build(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(module.named_parameters()):
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=draw) / math.sqrt(weight.shape[-1]))
    return module


def _from_source(source: str, dtype: torch.dtype | str) -> Any:  # noqa: ANN401 - a transformers model
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        for each in (config.get_text_config(), config):
            if quantised := getattr(each, "quantization_config", None):
                method, known = quantised.get("quant_method", "unknown"), ", ".join(DTYPES)
                raise EngineSpecError(
                    f"model {source!r} is quantised ({method}); this engine takes weights in {known}"
                )
        # No pickles, and no code of the model's own: either could run anything.
        return AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise EngineSpecError(f"cannot load model {source!r}: {error}") from error


def _describe(module: Any, name: str, tokenizer: str, *, is_default: bool) -> LoadedModel:  # noqa: ANN401
    config = module.config.get_text_config()
    generation = module.generation_config
    eos = generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id
    ends = eos if isinstance(eos, list) else [eos]
    return LoadedModel(
        module=module,
        name=name,
        tokenizer=tokenizer,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_model_len=_context(config),
        eos_token_ids=frozenset(end for end in ends if end is not None and 0 <= end < config.vocab_size),
        default_max_tokens=generation.max_new_tokens,
        device=str(module.device),
        dtype=str(module.dtype).removeprefix("torch."),
        layers=_probe(module, config),
        is_default=is_default,
    )


def _context(config: PretrainedConfig) -> int:
    """Longest sequence in tokens. With longrope, the longest position in a batch chooses the rotary factors
    of all its rows; cached KV may have been computed with other factors. Up to the original context, the
    factors never change."""
    longest: int = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original: int = min(longest, rope["original_max_position_embeddings"])
        _log.warning("longrope: serving the original context of %d tokens, not %d", original, longest)
        return original
    return longest


def _probe(module: Any, config: PretrainedConfig) -> tuple[LayerShape, ...]:  # noqa: ANN401
    """KV shapes by layer. Raises EngineSpecError for a model that cannot run over paged KV."""
    kinds = getattr(config, "layer_types", None) or []
    unknown = sorted(set(kinds) - _ATTENTION_KINDS)
    if unknown:
        raise EngineSpecError(f"it has layers of kind {', '.join(unknown)}")
    probe = Probe()
    token = torch.zeros(1, 1, dtype=torch.long, device=module.device)
    with torch.inference_mode(), attention_context(probe):
        module(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=token[0])
    total = config.num_hidden_layers
    if sorted(probe.shapes) != list(range(total)):
        raise EngineSpecError(
            f"{len(probe.shapes)} of its {total} layers use transformers' attention interface"
        )
    sliding = {index for index, kind in enumerate(kinds) if kind == "sliding_attention"}
    if not kinds and getattr(config, "sliding_window", None) is not None:
        sliding = set(range(total))
    if any(probe.windows[index] is None for index in sliding):
        raise EngineSpecError("its layers do not pass their sliding window on")
    return tuple(probe.shapes[index] for index in range(total))


class _Stretched:
    """A model that moves the tokens from the 13th on to the end of its context. This tests long positions
    without long sequences."""

    def __init__(self, module: Any, max_model_len: int) -> None:  # noqa: ANN401 - a transformers model
        self._module = module
        self._jump = max(0, max_model_len - _LONG)

    def __call__(self, *, position_ids: Tensor, **inputs: Any) -> Any:  # noqa: ANN401
        return self._module(position_ids=position_ids + self._jump * (position_ids >= _NEAR), **inputs)

    def get_input_embeddings(self) -> Any:  # noqa: ANN401
        return self._module.get_input_embeddings()


@torch.inference_mode()
def check_model(model: LoadedModel) -> None:
    """Raises EngineSpecError for a model whose paged answers differ from those of a full pass."""
    long = [(7 * index + 3) % model.vocab_size for index in range(_LONG)]
    short = long[:_SHARED] + [(5 * index + 1) % model.vocab_size for index in range(_NEAR - _SHARED)]
    stretched = _Stretched(model.module, model.max_model_len)
    expected = torch.cat([_full_logits(model.module, stretched, tokens) for tokens in (short, long)])
    paged = _paged_logits(replace(model, module=stretched), long, short)
    deviation = float((paged - expected).norm() / (expected - expected.mean()).norm())
    if not deviation <= TOLERANCE[model.module.dtype]:
        raise EngineSpecError(
            f"its answers over a paged KV cache differ from those of one full pass (by {deviation:.2g} of "
            "their spread): some layer depends on more than a token, its position and the KV before it"
        )


def _paged_logits(model: LoadedModel, long: list[int], short: list[int]) -> Tensor:
    """Logits of the last two tokens of `short`, then of `long`, [4, vocabulary]."""
    device = torch.device(model.device)
    # The last token but two of the short sequence is given by its embedding.
    embedded = _NEAR - 3
    row = model.module.get_input_embeddings()(torch.tensor([short[embedded]], device=device))
    storage = KvStorage(
        model.layers, gpu_blocks=8, host_blocks=0, tokens_per_block=_BLOCK, device=device, dtype=row.dtype
    )
    runner = Runner(model, storage, _BLOCK)
    tokens, extra_ids = array("i", short), array("Q", bytes(8 * _NEAR))
    tokens[embedded], extra_ids[embedded] = model.vocab_size, _EXTRA_ID
    first = KvSequence(tokens, extra_ids, None, embeddings={_EXTRA_ID: row}, computed=_SHARED)
    second = KvSequence(array("i", long), None, None)
    first.blocks, second.blocks = array("i", [0, 1, 7]), array("i", [0, 1, 2, 3, 4, 5])

    def run(*counts: tuple[KvSequence, int], logits: int = 1) -> Tensor:
        for sequence, count in counts:
            sequence.count, sequence.logits = count, logits
        made = runner.run([sequence for sequence, _ in counts])
        for sequence, count in counts:
            sequence.computed += count
        return made.float()

    run((second, _NEAR), logits=0)
    chunks = run((first, _NEAR - 1 - _SHARED), (second, _NEAR - 1))
    singles = run((first, 1), (second, 1))
    return torch.stack([chunks[0], singles[0], chunks[1], singles[1]])


def _full_logits(module: Any, stretched: _Stretched, tokens: list[int]) -> Tensor:  # noqa: ANN401
    """Logits of the last two tokens of a sequence that runs in one pass, without a cache."""
    ids = torch.tensor([tokens], device=module.device)
    module.set_attn_implementation("eager")
    try:
        output = stretched(
            input_ids=ids,
            position_ids=torch.arange(len(tokens), device=module.device)[None],
            # Without a mask, transformers takes the jump in the positions for the start of another sequence.
            attention_mask=torch.ones_like(ids),
            use_cache=False,
        )
    finally:
        module.set_attn_implementation(IMPLEMENTATION)
    logits: Tensor = output.logits[0, -2:]
    return logits.float()
