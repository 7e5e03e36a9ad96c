"""The models that tests and benchmarks run behave as real ones do where a cache is concerned."""

from __future__ import annotations

import hashlib
import re

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.make_gguf import convert, gguf_path, make_gguf
from scripts.make_model import write_model
from tests.llama import running_llama_server


@pytest.fixture(scope="module", params=["tiny", "swa", "sinks", "linear", "conv"])
def client(request, tmp_path_factory):
    log = tmp_path_factory.mktemp("llama") / "log"
    with (
        running_llama_server(log, gguf_path(request.param), slots=1) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
    ):
        yield client


def complete(client, prompt, **options):
    body = {"n_predict": 48, "temperature": 0, "ignore_eos": True, "return_tokens": True, "id_slot": 0}
    return client.post("/completion", json={"prompt": prompt, **body, **options}).json()


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_text_tokenises_back_to_the_ids_that_made_it(client, temperature):
    everything = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}
    for prompt in ("<|im_start|>assistant\n", "The cache of", "x = 3"):
        answer = complete(client, prompt, **everything)
        assert re.fullmatch(r"( [a-z]{2,})+", answer["content"])
        ids = client.post("/tokenize", json={"content": prompt + answer["content"]}).json()["tokens"]
        assert ids[-len(answer["tokens"]) :] == answer["tokens"]


def test_the_whole_context_counts(client):
    prompt = [300 + 37 * i % 3001 for i in range(100)]
    answers = [
        complete(client, [*prompt[:at], *range(3500, 3516), *prompt[at + 16 :]])["tokens"]
        for at in range(0, 84, 14)
    ]
    answers.append(complete(client, prompt)["tokens"])
    assert len({tuple(answer) for answer in answers}) == len(answers)
    assert min(len(set(answer)) for answer in answers) > 5


def test_files_are_the_same_each_time_and_others_by_seed(tmp_path):
    def digest(directory, seed):
        return hashlib.sha256(make_gguf("tiny", tmp_path / directory, seed).read_bytes()).digest()

    assert digest("a", 0) == digest("b", 0) != digest("a", 1)
    assert [path.name for path in sorted((tmp_path / "a").iterdir())] == ["tiny-0.gguf", "tiny-1.gguf"]


def test_a_converted_checkpoint_answers_like_the_checkpoint(tmp_path):
    write_model(tmp_path / "model", layers=2, hidden=64, heads=4, kv_heads=2, max_model_len=256)
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32")
    prompt = list(range(100, 120))
    tokens = module.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0].tolist()
    path = convert(tmp_path / "model", tmp_path / "model.gguf")
    with (
        running_llama_server(tmp_path / "log", path, "-ctk", "f32", "-ctv", "f32", slots=1) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
    ):
        assert complete(client, prompt, n_predict=8)["tokens"] == tokens[len(prompt) :]
