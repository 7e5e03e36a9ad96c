"""The input and output of `/kv/…` on a real socket. The cache's own tests and the contract suite check what
the routes do to the cache."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import threading

import torch
from safetensors.torch import save

T = 16


def bad(response, status, param):
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


async def complete(client, tokens, **fields):
    request = {"prompt": list(tokens), "max_tokens": 1, "temperature": 0} | fields
    response = await client.post("/v1/completions", json=request)
    assert response.status_code == 200, response.text
    return response.json()


async def test_load_does_not_wait_for_the_engine_thread(client, served_engine):
    release = threading.Event()
    held = served_engine.service.engine.call(lambda _cache: release.wait(30))
    try:
        load = (await client.get("/kv/load")).json()
    finally:
        release.set()
    assert held.result(30)
    assert load == {"instance": served_engine.service.instance, "running": 0, "waiting": 0}


async def test_slices_stop_at_their_size_and_go_on(client):
    await complete(client, range(5, 5 + 6 * T), cache_salt="slices")
    asked = {"cache_salt": "slices", "max_blocks": 4}
    told = [
        (await client.post(f"/kv/{verb}", json=asked)).json() for verb in ("offload", "offload", "restore")
    ]
    assert [(each["moved"], each["remaining"]) for each in told] == [(4, 2), (2, 0), (4, 2)]
    assert told[0]["bytes"] == 2 * told[1]["bytes"]
    assert set(told[0]["left"]) == {"in_use", "pinned", "no_room"}
    flushed = (await client.post("/kv/flush", json={"cache_salt": "slices"})).json()
    assert (flushed["moved"], flushed["remaining"]) == (6, 0)


async def test_a_flush_leaves_running_requests_their_blocks(client):
    prompt = [(i * 3) % 900 + 5 for i in range(200)]
    fields = {"cache_salt": "running", "ignore_eos": True, "max_tokens": 60}
    alone = await complete(client, prompt, **fields)
    await client.post("/kv/flush", json={"cache_salt": "running"})
    running = asyncio.create_task(complete(client, prompt, **fields))
    in_use = 0
    while not running.done():
        left = (await client.post("/kv/flush", json={"cache_salt": "running"})).json()["left"]
        in_use = max(in_use, left["in_use"])
    assert in_use > 0
    assert (await running)["choices"] == alone["choices"]


async def test_tables_come_and_go(client, served_engine):
    hidden = served_engine.service.model.hidden_size
    data = save({"t": torch.ones(2, hidden)})
    path = "/kv/prompt_tables/a/b c?extra_id=99"
    created = await client.put(path, content=data)
    table = {"id": "a/b c", "extra_id": 99, "rows": 2, "hidden": hidden}
    assert (created.status_code, created.json()) == (201, table)
    assert (await client.put(path, content=data)).status_code == 200
    assert table in (await client.get("/kv/prompt_tables")).json()["prompt_tables"]
    bad(await client.put(path, content=save({"t": torch.zeros(2, hidden)})), 409, "table_id")
    bad(await client.put("/kv/prompt_tables/x?extra_id=0", content=data), 400, "extra_id")
    bad(await client.put("/kv/prompt_tables/x", content=b"\x80\x04pickle"), 400, "table")
    assert (await client.delete("/kv/prompt_tables/a/b c")).json() == {"deleted": True}
    assert (await client.delete("/kv/prompt_tables/a/b c")).json() == {"deleted": False}


async def test_embeddings_in_a_message(client, served_engine):
    hidden, vocab = served_engine.service.model.hidden_size, served_engine.service.model.vocab_size
    rows = save({"t": torch.randn(3, hidden, generator=torch.Generator().manual_seed(1))})
    part = {"type": "prompt_embeds", "data": base64.b64encode(rows).decode()}
    text = {"type": "text", "text": "go on"}
    body = {"messages": [{"role": "user", "content": [part, text]}], "max_tokens": 2}
    tokenized = (await client.post("/tokenize", json=body)).json()
    fake = [token for token in tokenized["tokens"] if token >= vocab]
    assert fake == [vocab, vocab + 1, vocab + 2]
    assert sum(value > 0 for value in tokenized["extra_ids"]) == 3
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == tokenized["count"]
    broken = save({"t": torch.full((1, hidden), math.inf)})
    part["data"] = base64.b64encode(broken).decode()
    bad(await client.post("/v1/chat/completions", content=json.dumps(body)), 400, "messages")
