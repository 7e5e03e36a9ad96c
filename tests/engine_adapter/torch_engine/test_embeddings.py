"""Embeddings: the vectors, compared with transformers' own, and the route."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest
import torch

from engine_adapter.torch_engine.completions import AT_ONCE, MAX_TOKENS
from engine_adapter.torch_engine.model import load_model
from engine_adapter.torch_engine.protocol import MAX_INPUTS
from tests.engine_adapter.torch_engine.engine_world import (
    CONFIGS,
    Reference,
    served,
    tiny,
    until,
    write_config_model,
)

PROMPT = [2 + (31 * n + 7 * n * n) % 90 for n in range(41)]
TEXT = "The ship came to the harbour. "


@pytest.mark.parametrize("kind", CONFIGS)
def test_hidden_states_are_the_models_however_they_came_about(kind, tmp_path):
    directory = write_config_model(kind, tmp_path)
    with torch.inference_mode():
        expected = Reference(directory).module.base_model(torch.tensor([PROMPT])).last_hidden_state[0, -1:]
    with served(load_model(str(directory)), prefill_chunk=16) as world:
        cold = world.ask(PROMPT, 1, hidden=True).wait()
        beside = [
            world.ask(PROMPT, 12),
            world.ask(PROMPT, 2, prompt_logprobs=1),
            world.ask(PROMPT, 1, hidden=True),
            world.ask(PROMPT[:9], 1, hidden=True),
        ]
        warm = beside[2].wait()
        assert (cold.cached, warm.cached) == (0, 40)
        for answer in (cold, warm):
            torch.testing.assert_close(answer.hidden, expected, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(beside[3].wait().hidden, expected, atol=1e-2)
        assert beside[0].wait().tokens[:2] == beside[1].wait().tokens


def test_a_model_whose_logits_are_not_made_by_one_layer_gives_none(monkeypatch):
    model = tiny()
    monkeypatch.setattr(type(model.module), "get_output_embeddings", lambda _: None)
    with served(model) as world:
        beside = world.ask(PROMPT, 20)
        refused = world.ask(PROMPT[::-1], 1, hidden=True).wait()
        assert (refused.finished.reason, refused.finished.param) == ("refused", "model")
        assert len(beside.wait().tokens) == 20


async def embed(client, given, **fields):
    answer = await client.post("/v1/embeddings", json={"input": given, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def vectors(client, given, **fields):
    made = await embed(client, given, **fields)
    assert [each["index"] for each in made["data"]] == list(range(len(made["data"])))
    return np.array([each["embedding"] for each in made["data"]])


async def test_texts_and_ids_alone_and_in_lists(client, served_engine):
    ids = served_engine.service.tokenizer.encode(TEXT, add_special_tokens=True).tolist()
    alone = await vectors(client, TEXT)
    assert alone.shape == (1, served_engine.service.model.hidden_size)
    np.testing.assert_allclose(np.linalg.norm(alone, axis=1), 1, atol=1e-5)
    for given in ([TEXT], ids, [ids]):
        np.testing.assert_allclose(await vectors(client, given), alone, atol=1e-5)
    several = await vectors(client, ["other", TEXT, "more of it", TEXT])
    np.testing.assert_allclose(several[[1, 3]], alone[[0, 0]], atol=1e-5)
    assert (abs(several[[0, 2]] - alone) > 1e-2).any(axis=1).all()


async def test_base64_and_usage(client, served_engine):
    made = await embed(client, [TEXT, "b"], encoding_format="base64", dimensions=256, user="x")
    found = np.stack([np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in made["data"]])
    np.testing.assert_allclose(found, await vectors(client, [TEXT, "b"]), atol=1e-5)
    tokenizer = served_engine.service.tokenizer
    tokens = sum(len(tokenizer.encode(text, add_special_tokens=True)) for text in (TEXT, "b"))
    assert made["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (made["object"], made["model"]) == ("list", "kvpin-tiny")


async def test_kv_is_shared_under_the_same_salt_alone(client, served_engine):
    counters = served_engine.service.engine.counters
    long, reused = TEXT * 20, []
    for salt in ("embed-one", "embed-two", "embed-one"):
        before = counters.cached_tokens
        await embed(client, long, cache_salt=salt)
        reused.append(counters.cached_tokens - before)
    assert reused[:2] == [0, 0]
    assert reused[2] > 100
    answer = await client.post("/v1/completions", json={"prompt": long, "cache_salt": "embed-two"})
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == reused[2]


async def test_more_than_the_cache_holds_waits_for_room_while_others_are_answered(client, served_engine):
    engine = served_engine.service.engine
    texts = [f"{number} " + TEXT * 40 for number in range(20)]
    embedding = asyncio.create_task(embed(client, texts, cache_salt="room", priority=1))
    await until(lambda: engine.counters.running)
    answer = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert answer.status_code == 200
    assert not embedding.done()
    made = await embedding
    assert len(made["data"]) == 20
    assert made["usage"]["total_tokens"] > engine.gpu_blocks * served_engine.service.options.tokens_per_block


async def test_more_texts_than_the_engine_gets_at_a_time(client, served_engine):
    given = [[5 + number // 90, 5 + number % 90] for number in range(2 * AT_ONCE + 3)]
    embedding = asyncio.create_task(vectors(client, given))
    counters, most = served_engine.service.engine.counters, 0
    while not embedding.done():
        most = max(most, counters.running + counters.waiting)
        await asyncio.sleep(0.001)
    assert 0 < most <= AT_ONCE
    alone = np.concatenate([await vectors(client, given[number]) for number in (0, AT_ONCE, 2 * AT_ONCE + 2)])
    made = await embedding
    np.testing.assert_allclose(made[[0, AT_ONCE, -1]], alone, atol=1e-4)


async def test_when_the_client_leaves_the_rest_is_not_computed(client, served_engine):
    counters = served_engine.service.engine.counters
    before = counters.finished.get("cancelled", 0)
    texts = [f"{number} " + TEXT * 40 for number in range(40)]
    embedding = asyncio.create_task(embed(client, texts, cache_salt="leaves"))
    await until(lambda: counters.running)
    embedding.cancel()
    await until(lambda: counters.finished.get("cancelled", 0) > before + 5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[5], []]}, "input[1]"),
        ({"input": [5, 4096]}, "input[1]"),
        ({"input": [[5], [6, 4096]]}, "input[1][1]"),
        ({"input": [5] * 5000}, "input"),
        ({"input": "x" * 3_000_000}, "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": [[5] * 4000] * (MAX_TOKENS // 4000 + 1)}, "input"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
    ],
)
async def test_what_cannot_be_embedded_is_named(client, fields, param):
    answer = await client.post("/v1/embeddings", json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_beyond_the_most_tokens_nothing_is_encoded(client, served_engine, monkeypatch):
    service, encoded = served_engine.service, []
    encode = service.encode

    def counting(text, *given, **options):
        encoded.append(text)
        return encode(text, *given, **options)

    monkeypatch.setattr(service, "encode", counting)
    monkeypatch.setattr("engine_adapter.torch_engine.completions.MAX_TOKENS", 10)
    answer = await client.post("/v1/embeddings", json={"input": ["a"] * 12})
    assert (answer.status_code, len(encoded)) == (400, 11)
    assert answer.json()["error"]["message"] == "input has more than 10 tokens"
