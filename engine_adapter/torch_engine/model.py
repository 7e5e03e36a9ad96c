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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from engine_adapter.errors import EngineSpecError
from engine_adapter.torch_engine.attention import (
    IMPLEMENTATION,
    KvStorage,
    LayerShape,
    Probe,
    attention_context,
)
from engine_adapter.torch_engine.kv_cache import KvSequence
from engine_adapter.torch_engine.runner import LoadedModel, Runner, first_line

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


def load_model(
    source: str | None,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    served_name: str | None = None,
) -> LoadedModel:
    """Loads a Hugging Face causal LM from a directory or hub id; None is `kvpin-tiny`.

    `dtype` None takes the checkpoint's.

    Raises:
        EngineSpecError: the model cannot be loaded, or this engine cannot run it. The text says why.
    """
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
        reason = str(error)
        if not isinstance(error, EngineSpecError):
            reason = f"a forward pass over paged KV fails ({first_line(error)})"
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
                values = torch.randn(weight.shape, generator=draw) / math.sqrt(weight.shape[-1])
                weight.copy_(values)
    return module


def _from_source(source: str, dtype: torch.dtype | str) -> Any:  # noqa: ANN401 - a transformers model
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        _refuse_quantised(config, source)
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


def _refuse_quantised(config: PretrainedConfig, source: str) -> None:
    quantised = getattr(config.get_text_config(), "quantization_config", None) or getattr(
        config, "quantization_config", None
    )
    if quantised:
        method = quantised.get("quant_method", "unknown")
        raise EngineSpecError(
            f"model {source!r} is quantised ({method}); this engine takes weights in {', '.join(DTYPES)}"
        )


def _describe(module: Any, name: str, tokenizer: str, *, is_default: bool) -> LoadedModel:  # noqa: ANN401
    config = module.config.get_text_config()
    layers = _probe(module, config)
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
        layers=layers,
        is_default=is_default,
    )


def _context(config: PretrainedConfig) -> int:
    """Longest sequence in tokens.

    With longrope, the longest position in a batch chooses the rotary factors of all its rows; cached KV may
    have been computed with other factors. Up to the original context, the factors never change.
    """
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
    """A model that moves the tokens from the 13th on to the end of its context.

    This tests long positions without long sequences.
    """

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
        model.layers,
        gpu_blocks=8,
        host_blocks=0,
        tokens_per_block=_BLOCK,
        device=device,
        dtype=row.dtype,
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
