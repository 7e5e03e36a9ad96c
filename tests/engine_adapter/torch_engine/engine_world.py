"""Small models of several kinds, an engine over them, and transformers' own answers to compare with."""

from __future__ import annotations

import asyncio
import threading
from array import array
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from engine_adapter.torch_engine.engine import EngineCore
from engine_adapter.torch_engine.model import load_model, random_model
from engine_adapter.torch_engine.requests import Finished, GenerationRequest, SamplingParams, Scheduled, Token
from engine_adapter.torch_engine.serve import EmbeddedOptions
from engine_adapter.types import KvTarget

VOCAB = 97
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_GQA = {"intermediate_size": 48, "num_key_value_heads": 2, "tie_word_embeddings": False}


def phi3_with_longrope(original_context):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": original_context,
    }
    return Phi3Config(
        **_SIZES, **_GQA, rope_parameters=rope, original_max_position_embeddings=original_context
    )


CONFIGS = {
    "llama": LlamaConfig(**_SIZES, **_GQA, head_dim=8),
    "qwen2": Qwen2Config(**_SIZES, **_GQA),
    "qwen3": Qwen3Config(**_SIZES, **_GQA, head_dim=16),
    "mistral": MistralConfig(**_SIZES, **_GQA, head_dim=8, sliding_window=12),
    "gemma2": Gemma2Config(
        **_SIZES, **_GQA, head_dim=8, sliding_window=12, attn_logit_softcapping=5.0, query_pre_attn_scalar=8
    ),
    "gemma3": Gemma3TextConfig(**_SIZES, **_GQA, head_dim=8, sliding_window=12, query_pre_attn_scalar=8),
    "phi3": phi3_with_longrope(128),
    "gpt2": GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    ),
}


def write_config_model(kind, directory):
    """Writes a model with random weights: a kind of `CONFIGS`, or a configuration."""
    module = random_model(CONFIGS[kind] if isinstance(kind, str) else kind, seed=3)
    module.save_pretrained(directory)
    return directory


class Reference:
    """transformers' own model with eager attention, without our cache."""

    def __init__(self, directory):
        self.module = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def greedy(self, prompt, count, embeds=None):
        """Tokens of a greedy generation that nothing stops."""
        start = torch.tensor([prompt])
        given = {"input_ids": start} if embeds is None else {"inputs_embeds": embeds[None]}
        output = self.module.generate(
            **given,
            attention_mask=torch.ones_like(start),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )[0].tolist()
        return output[len(prompt) :] if embeds is None else output


class Answer:
    """All outputs of one request."""

    def __init__(self, request_id):
        self.id = request_id
        self.outputs = []
        self.done = threading.Event()

    def __call__(self, outputs):
        self.outputs += outputs
        if isinstance(outputs[-1], Finished):
            self.done.set()

    def wait(self):
        assert self.done.wait(30)
        return self

    @property
    def tokens(self):
        return [output.token_id for output in self.outputs if isinstance(output, Token)]

    @property
    def hidden(self):
        """The hidden state before each token."""
        tokens = [output for output in self.outputs if isinstance(output, Token)]
        return torch.stack([torch.frombuffer(bytearray(each.hidden), dtype=torch.float32) for each in tokens])

    @property
    def finished(self):
        assert isinstance(self.outputs[-1], Finished)
        return self.outputs[-1]

    @property
    def cached(self):
        (scheduled,) = [output for output in self.outputs if isinstance(output, Scheduled)]
        assert self.outputs[0] is scheduled
        return scheduled.cached_tokens


class Served:
    """A running engine with its events, and short calls for tests."""

    def __init__(self, model, **options):
        self.model = model
        self.batches = []
        self.engine = EngineCore(
            model, EmbeddedOptions(**{"kv_blocks": 64, "tokens_per_block": 4, **options}), self.batches.append
        )
        self._next = 0

    def ask(self, prompt, count=8, *, extra_ids=None, embeddings=None, hidden=False, **sampling):
        self._next += 1
        answer = Answer(f"r{self._next}")
        request = GenerationRequest(
            answer.id,
            array("i", prompt),
            SamplingParams(**{"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **sampling}),
            extra_ids=None if extra_ids is None else array("Q", extra_ids),
            embeddings=embeddings or {},
            wants_hidden=hidden,
        )
        self.engine.submit(request, answer)
        return answer

    def tokens(self, prompt, count=8, **kwargs):
        return self.ask(prompt, count, **kwargs).wait().tokens

    def call(self, fn):
        return self.engine.call(fn).result(timeout=30)

    def stats(self):
        return self.call(lambda cache: cache.stats(0.0))

    def operate(self, verb, prompt=None):
        target = KvTarget() if prompt is None else KvTarget(array("i", prompt))
        return self.call(lambda cache: getattr(cache, verb)(target, 10_000))


@contextmanager
def served(model, **options):
    """A running engine. At the end, checks that no block is lost."""
    torch.set_num_threads(1)
    world = Served(model, **options)
    world.engine.start()
    try:
        yield world
        if world.engine.alive:
            gpu = world.stats()["gpu"]
            assert gpu["active"] == 0
            assert gpu["free"] + gpu["cached"] == gpu["total"]
    finally:
        world.engine.stop()


async def until(condition):
    """Waits until the condition holds."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("it never holds")


@cache
def tiny():
    return load_model(None)
