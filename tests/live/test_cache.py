"""What kvpin is for: prefixes are found, moved, kept and forgotten as told."""

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


def test_a_second_question_finds_the_first_ones_document(kvpin):
    first = ask(kvpin, document("finding") + "\n\nWho wrote it?")
    second = ask(kvpin, document("finding") + "\n\nWhen did it end?")
    assert cached(first) == 0
    assert cached(second) > 300
    assert first.headers["x-kvpin-engine"] == second.headers["x-kvpin-engine"]
    for answer in (first, second):
        assert int(answer.headers["x-kvpin-cached-tokens"]) == cached(answer)


def test_offloaded_and_restored_kv_gives_the_same_answer(kvpin):
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
    (back,) = done(kvpin.admin("POST", "restore", json=target(text)))["engines"]
    assert back["done"] == moved["done"]
    assert kvpin.engines()[home]["kv"]["host"]["cached"] == before["host"]["cached"]
    again = ask(kvpin, text)
    assert cached(again) > 300
    assert text_of(again) == text_of(cold)


def test_a_prompt_restores_what_it_needs_by_itself(kvpin):
    text = document("restoring itself")
    cold = ask(kvpin, text)
    done(kvpin.admin("POST", "offload", json=target(text)))
    again = ask(kvpin, text)
    assert cached(again) > 300
    assert text_of(again) == text_of(cold)


def test_a_warmed_prefix_is_there_when_it_is_asked_for(kvpin):
    text = document("warming")
    done(kvpin.admin("POST", "warm", json=target(text)))
    answer = ask(kvpin, text + " Now?")
    assert cached(answer) > 300


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


def test_a_dry_run_names_the_engine_that_holds_it(kvpin):
    text = document("asking where")
    home = ask(kvpin, text).headers["x-kvpin-engine"]
    served = kvpin.engines()[home]["kv"]["tokens"]
    decision = kvpin.admin("POST", "route", json=target(text)).raise_for_status().json()
    assert decision["engine"] == home
    assert len(decision["candidates"]) == 2
    assert kvpin.engines()[home]["kv"]["tokens"] == served
