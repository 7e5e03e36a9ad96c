"""p-tuning tables and prompt embeddings, end to end."""

from __future__ import annotations

import base64

import pytest
import torch
from safetensors.torch import save
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.live.answers import cached
from tests.live.conftest import running_kvpin

pytestmark = pytest.mark.live

HIDDEN, VOCABULARY, ROWS = 256, 4096, 32


def tensor(seed, rows=ROWS, hidden=HIDDEN):
    values = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed))
    return save({"table": values * 0.02})


def register(kvpin, data, **params):
    headers = {"content-type": "application/octet-stream"}
    return kvpin.admin("POST", "prompt_tables", content=data, headers=headers, params=params)


def complete(kvpin, ids, model="kvpin-tiny", **fields):
    body = {"model": model, "prompt": ids, "max_tokens": 4, "temperature": 0, **fields}
    return kvpin.post("completions", body)


@pytest.fixture(scope="module")
def small_vocabulary(tmp_path_factory):
    """A model with a vocabulary of 100, as in the worked example of docs/cache-identity.md."""
    directory = tmp_path_factory.mktemp("vocabulary-100")
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(100)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(directory)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def test_the_worked_example(small_vocabulary, tmp_path):
    engine = (
        f"embedded: --model {small_vocabulary} --served-model-name small --tokens-per-block 4 --threads 1"
    )
    first_ids, other_text = [100, 101, 102, 103, 1, 2, 3, 4], [100, 101, 102, 103, 5, 6, 7, 8]
    ones, twos = [1] * 4 + [0] * 4, [2] * 4 + [0] * 4
    with running_kvpin(tmp_path / "log", "--managed", engine, "--managed", engine) as kvpin:
        for extra_id in (1, 2):
            table = tensor(extra_id, rows=4, hidden=32)
            assert register(kvpin, table, extra_id=extra_id).json()["extra_id"] == extra_id
        first = complete(kvpin, first_ids, "small", extra_ids=ones)
        second = complete(kvpin, first_ids, "small", extra_ids=twos)
        third = complete(kvpin, other_text, "small", extra_ids=ones)
        again = complete(kvpin, first_ids, "small", extra_ids=ones)
        assert [cached(answer) for answer in (first, second, third, again)] == [0, 0, 4, 4]
        assert again.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]
        assert complete(kvpin, first_ids, "small", extra_ids=[3] * 4 + [0] * 4).status_code == 400


def test_a_named_table_gives_its_rows_an_identity(kvpin):
    one, two = (register(kvpin, tensor(seed)).raise_for_status().json() for seed in (11, 12))
    ids = [*range(VOCABULARY, VOCABULARY + ROWS), *range(100, 120)]
    assert cached(complete(kvpin, ids, prompt_table=one["table_id"])) == 0
    assert cached(complete(kvpin, ids, prompt_table=two["table_id"])) == 0
    assert cached(complete(kvpin, ids, prompt_table=one["table_id"])) == 48


def test_labels_of_a_client_do_not_make_two_tables_one(kvpin):
    one, two = (register(kvpin, tensor(seed)).raise_for_status().json() for seed in (13, 14))
    ids, labels = [*range(VOCABULARY, VOCABULARY + ROWS), *range(50, 66)], [7] * ROWS + [0] * 16
    for table in (one, two):
        answer = complete(kvpin, ids, prompt_table=table["table_id"], extra_ids=labels)
        assert cached(answer) == 0
    assert cached(complete(kvpin, ids, prompt_table=one["table_id"], extra_ids=labels)) == 32


def test_embeddings_in_a_message(kvpin):
    def ask(seed):
        part = {"type": "prompt_embeds", "data": base64.b64encode(tensor(seed)).decode()}
        content = [{"type": "text", "text": "Continue:"}, part, {"type": "text", "text": "and so on"}]
        body = {
            "model": "kvpin-tiny",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 4,
            "temperature": 0,
        }
        return kvpin.post("chat/completions", body)

    first, other, again = ask(21), ask(22), ask(21)
    assert cached(first) == 0
    assert cached(other) <= 16  # at most the text before the embeddings
    assert cached(again) >= 32
    assert again.json()["choices"] == first.json()["choices"]


def embedded(*tensors):
    return [base64.b64encode(each).decode() for each in tensors]


def test_embeddings_as_a_completions_prompt(kvpin):
    def ask(seed, salt=None):
        given = embedded(tensor(seed, rows=50))[0]
        return complete(kvpin, "", prompt_embeds=given, cache_salt=salt)

    first, other, again = ask(31), ask(32), ask(31)
    assert [cached(answer) for answer in (first, other, again)] == [0, 0, 48]
    assert again.json()["choices"] == first.json()["choices"]
    assert [cached(ask(31, "mine")) for _ in range(2)] == [0, 48]
    part = {"type": "prompt_embeds", "data": embedded(tensor(31, rows=50))[0]}
    chat = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1, "model": "kvpin-tiny"}
    assert cached(kvpin.post("chat/completions", chat)) == 0


def test_embeddings_beside_other_prompts(kvpin):
    """Each is a prompt of its own, embeddings first, as in vLLM."""
    texts = [
        f"{name} of the harbour, where the ship lay for years and years. " * 4 for name in ("One", "Two")
    ]
    given = embedded(tensor(41), tensor(42))
    joined = complete(kvpin, texts, prompt_embeds=given).raise_for_status().json()
    alone = [complete(kvpin, None, prompt_embeds=each) for each in given]
    alone += [complete(kvpin, each) for each in texts]
    assert all(cached(each) > 0 for each in alone)
    assert [choice["index"] for choice in joined["choices"]] == [0, 1, 2, 3]
    choices = [each.json()["choices"][0]["text"] for each in alone]
    assert [choice["text"] for choice in joined["choices"]] == choices
