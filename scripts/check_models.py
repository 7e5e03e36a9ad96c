"""Which architectures of transformers the embedded engine serves, on tiny random checkpoints of each.

    python scripts/check_models.py [--only llama,gpt_oss] [--markdown]

For every causal language model of transformers: makes a checkpoint, loads it as the engine does, with its
check at load, and lets the engine answer prompts in chunks, together and with reuse. The answers are compared
with those of transformers' own greedy generation. Each architecture ends as one of

- `served`: all answers are those of transformers,
- `refused`: the engine does not load it, and says why,
- `wrong`: it was loaded and answered otherwise. There must be none: the exit status is then 1,
- `not made`: no tiny checkpoint could be made, for example of a model that is not for text alone.
"""

from __future__ import annotations

import argparse
import logging
import signal
import tempfile
import threading
import warnings
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from engine_adapter.errors import EngineSpecError
from engine_adapter.torch_engine.engine import EngineCore
from engine_adapter.torch_engine.model import load_model, random_model
from engine_adapter.torch_engine.requests import Finished, GenerationRequest, Output, SamplingParams, Token
from engine_adapter.torch_engine.serve import EmbeddedOptions

SMALL: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "sliding_window": 12,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rotary_dim": 8,
    "attn_layer_indices": [1, 3],
    "layer_group_size": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Sizes, as far as a configuration knows their names."""
MOST_PARAMETERS = 20_000_000
TIMEOUT_S = 120
PROMPTS = ([5 + 7 * at % 110 for at in range(45)], [5 + 7 * at % 110 for at in range(33)], [9, 8, 7, 9, 8])
"""The first two share their beginning; the second is longer than a sliding window and a chunk."""
ANSWER = 12  # tokens


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an architecture ended, and why."""

    kind: str
    ended: str
    reason: str = ""


class NotMadeError(Exception):
    """No tiny checkpoint of the architecture can be made."""


def tiny_config(kind: str) -> Any:  # noqa: ANN401 - a transformers configuration
    """The configuration of an architecture with the sizes of `SMALL`."""
    default = CONFIG_MAPPING[kind]()
    if default.get_text_config() is not default:
        raise NotMadeError("not for text alone")
    sizes = {name: size for name, size in SMALL.items() if hasattr(default, name)}
    if (
        "qk_rope_head_dim" in sizes
    ):  # multi-head latent attention: as many keys as heads, of a size of its own
        sizes.pop("head_dim", None)
        sizes["num_key_value_heads"] = SMALL["num_attention_heads"]
    return type(default)(**sizes)


def make_checkpoint(kind: str, directory: Path) -> None:
    """Writes a tiny random checkpoint; raises NotMadeError, or whatever the architecture raises."""
    config = tiny_config(kind)
    with torch.device("meta"):
        build: Any = AutoModelForCausalLM.from_config
        size = sum(weight.numel() for weight in build(config).parameters())
    if size > MOST_PARAMETERS:
        raise NotMadeError(f"{size:,} parameters with the sizes that are known")
    random_model(config, seed=1).save_pretrained(directory)


def expected_answers(directory: Path) -> list[list[int]]:
    """Answers of transformers itself to `PROMPTS`."""
    load: Any = AutoModelForCausalLM.from_pretrained  # untyped in transformers
    module = load(directory, dtype=torch.float32, attn_implementation="eager").eval()
    limits = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": False, "eos_token_id": None}
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = module.generate(ids, attention_mask=torch.ones_like(ids), **limits)
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def engine_answers(directory: Path) -> list[list[int]]:
    """Answers of the engine: all prompts together, then the same again from cache."""
    options = EmbeddedOptions(kv_blocks=128, tokens_per_block=4, prefill_chunk=16)
    engine = EngineCore(load_model(str(directory)), options, lambda _: None)
    engine.start()
    try:
        return [answer for turn in range(2) for answer in _ask_all(engine, turn)]
    finally:
        engine.stop()


def _ask_all(engine: EngineCore, turn: int) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in PROMPTS]
    ends = [threading.Event() for _ in PROMPTS]
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):

        def receive(outputs: list[Output], index: int = index) -> None:
            answers[index] += [output.token_id for output in outputs if isinstance(output, Token)]
            if isinstance(outputs[-1], Finished):
                ends[index].set()

        engine.submit(GenerationRequest(f"{turn}-{index}", array("i", prompt), sampling), receive)
    for end in ends:
        end.wait(TIMEOUT_S)
    return answers


def check(kind: str) -> Verdict:
    """Tries one architecture."""
    with tempfile.TemporaryDirectory() as path:
        directory = Path(path, "model")
        try:
            with _deadline():
                make_checkpoint(kind, directory)
                expected = expected_answers(directory)
        except Exception as error:  # noqa: BLE001 - an architecture's own; transformers itself cannot run it
            return Verdict(kind, "not made", _line(error))
        try:
            with _deadline():
                answers = engine_answers(directory)
        except EngineSpecError as error:
            return Verdict(kind, "refused", _line(error).rpartition("cannot run here: ")[2])
    if answers == 2 * expected:
        return Verdict(kind, "served")
    return Verdict(kind, "wrong", f"{answers} instead of {expected}")


@contextmanager
def _deadline() -> Iterator[None]:
    """Raises TimeoutError in this thread after `TIMEOUT_S`."""

    def expire(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, expire)
    signal.alarm(TIMEOUT_S)
    try:
        yield
    finally:
        signal.alarm(0)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).split(". ")[0][:120].replace("|", "/") or type(error).__name__


def main() -> int:
    """Checks all architectures, or those named; 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="model types, separated by commas")
    parser.add_argument("--markdown", action="store_true", help="print the table of the documentation")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = options.only.split(",") if options.only else sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    verdicts = []
    for kind in kinds:
        verdicts.append(check(kind))
        if not options.markdown:
            print(f"{kind:24} {verdicts[-1].ended:9} {verdicts[-1].reason}", flush=True)
    if options.markdown:
        print_table(verdicts)
    counts = Counter(verdict.ended for verdict in verdicts)
    print(", ".join(f"{number} {ended}" for ended, number in counts.most_common()))
    return 1 if counts["wrong"] else 0


def print_table(verdicts: list[Verdict]) -> None:
    """The architectures that share an end and a reason in one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        rows.setdefault((verdict.ended, verdict.reason), []).append(verdict.kind)
    print("| | models | why |\n|---|---|---|")
    for (ended, reason), kinds in sorted(rows.items(), key=lambda row: (row[0][0], -len(row[1]))):
        print(f"| {ended} ({len(kinds)}) | {', '.join(kinds)} | {reason} |")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.disable(logging.ERROR)
    raise SystemExit(main())
