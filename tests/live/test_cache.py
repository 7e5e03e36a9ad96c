"""Prefixes are moved and kept as told. That they are found, flushed, warmed and restored: test_tenants.py,
test_examples.py and tests/proxy/cli."""

from __future__ import annotations

import pytest

from tests.live.answers import cached, text_of

pytestmark = pytest.mark.live


def document(name, entries=60):
    return f"Log of {name}. " + " ".join(f"Entry {n}: all was well." for n in range(entries))


def ask(kvpin, text, **fields):
    body = {
        "model": "kvpin-tiny",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
        "temperature": 0,
        **fields,
    }
    return kvpin.post("chat/completions", body).raise_for_status()


def target(text):
    return {"model": "kvpin-tiny", "messages": [{"role": "user", "content": text}]}


def done(answer):
    operation = answer.raise_for_status().json()
    assert operation["state"] == "done", operation
    return operation


def test_a_prompt_restores_what_was_offloaded_by_itself_and_gets_the_same_answer(kvpin):
    text = document("moving") + "\n\nWhat went wrong?"
    cold = ask(kvpin, text)
    home = cold.headers["x-kvpin-engine"]
    before = kvpin.engines()[home]["kv"]
    (moved,) = done(kvpin.admin("POST", "offload", json=target(text)))["engines"]
    offloaded = kvpin.engines()[home]["kv"]
    assert moved["engine"] == home
    assert moved["done"] > 20
    assert offloaded["gpu"]["free"] == before["gpu"]["free"] + moved["done"]
    assert offloaded["host"]["cached"] == before["host"]["cached"] + moved["done"]
    again = ask(kvpin, text)
    assert int(again.headers["x-kvpin-predicted-tokens"]) == cached(again) > 300
    assert text_of(again) == text_of(cold)


def test_a_pinned_prefix_survives_a_flood(kvpin):
    text = document("keeping")
    home = ask(kvpin, text).headers["x-kvpin-engine"]
    pin = done(kvpin.admin("POST", "pin", json={**target(text), "ttl_s": 600}))
    for number in range(30):
        ask(kvpin, document(f"flood {number}", entries=120), max_tokens=1)
    assert kvpin.engines()[home]["kv"]["pinned_blocks"] > 20
    assert cached(ask(kvpin, text)) > 300
    done(kvpin.admin("POST", "unpin", json={"pin_id": pin["result"]["pin_id"]}))
    assert kvpin.engines()[home]["kv"]["pinned_blocks"] == 0
