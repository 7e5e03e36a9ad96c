"""Salts and LoRA adapters on a real vLLM: nothing is shared that must not be, and no answer changes."""

from __future__ import annotations

import httpx
import pytest

from tests.live.server_world import MODEL, WAIT_S
from tests.vllm_live.vllm_world import BLOCK, LORA, vllm_world

pytestmark = pytest.mark.live

RED, BLUE = ({"authorization": f"Bearer key-of-{tenant}"} for tenant in ("red", "blue"))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    keys = tuple(f"--api-key=key-of-{tenant}" for tenant in ("red", "blue"))
    with vllm_world(tmp_path_factory.mktemp("vllm"), kvpin_flags=keys) as world:
        yield world


def path_of(fields):
    return "completions" if "prompt" in fields else "chat/completions"


def ask(world, fields, tenant=RED):
    """An answer's predicted tokens, reused tokens and text."""
    answer = world.post(path_of(fields), {"max_tokens": 16, **fields}, headers=tenant)
    content = answer.json()
    choice = content["choices"][0]
    text = choice["text"] if "prompt" in fields else choice["message"]["content"]
    cached = content["usage"]["prompt_tokens_details"]["cached_tokens"]
    return int(answer.headers["x-kvpin-predicted-tokens"]), cached, text


def direct(world, fields):
    body = {"model": MODEL, "temperature": 0, **fields}
    url = f"{world.servers[0].url}/v1/{path_of(fields)}"
    return httpx.post(url, json=body, timeout=WAIT_S, trust_env=False).raise_for_status().json()


def long_chat(subject):
    return {"messages": [{"role": "user", "content": f"Tell me about {subject}. " * 40}]}


def test_two_tenants_share_nothing(world, tell):
    chat = long_chat("harbours")
    red = [ask(world, chat, RED) for _ in range(2)]
    blue = [ask(world, chat, BLUE) for _ in range(2)]
    again = ask(world, chat, RED)
    tell(f"red {[each[:2] for each in red]}, blue {[each[:2] for each in blue]}, red again {again[:2]}")
    assert [each[:2] for each in (red[0], blue[0])] == [(0, 0), (0, 0)]
    assert red[1][:2] == blue[1][:2] == again[:2]
    assert again[1] > 4 * BLOCK
    assert len({each[2] for each in (*red, *blue, again)}) == 1


def test_a_clients_salt_divides_its_tenants_cache(world):
    chat = long_chat("lighthouses")
    plain = [ask(world, chat)[:2] for _ in range(2)]
    salted = [ask(world, chat | {"cache_salt": "mine"})[:2] for _ in range(2)]
    other = ask(world, chat | {"cache_salt": "mine"}, BLUE)[:2]
    assert plain[0] == salted[0] == other == (0, 0)
    assert plain[1] == salted[1] > (0, 0)


def test_an_adapter_shares_nothing_with_its_base(world, tell):
    chat = long_chat("knots")
    base = [ask(world, chat) for _ in range(2)]
    lora = [ask(world, chat | {"model": LORA}) for _ in range(2)]
    again = ask(world, chat)
    tell(f"base {[each[:2] for each in base]}, {LORA} {[each[:2] for each in lora]}, base again {again[:2]}")
    assert base[0][:2] == lora[0][:2] == (0, 0)
    assert base[1][:2] == lora[1][:2] == again[:2] > (0, 0)
    assert base[0][2] == base[1][2] == again[2] != lora[0][2] == lora[1][2]


def test_reuse_changes_no_answer(world):
    """Answers through kvpin, cold and cached, and from the engine itself without a salt."""
    for fields in (long_chat("tides"), {"prompt": "The log of a lighthouse: " * 40}):
        cold, cached = ask(world, fields), ask(world, fields)
        assert cached[1] > cold[1] == 0
        choice = direct(world, {"max_tokens": 16, **fields})["choices"][0]
        theirs = choice["text"] if "prompt" in fields else choice["message"]["content"]
        assert cold[2] == cached[2] == theirs


def test_a_proxy_that_joins_late_knows_what_the_engine_holds(world, tell):
    chats = [long_chat(subject) for subject in ("anchors", "ropes", "bells")]
    for chat in chats:
        ask(world, chat)
    world.restart_kvpin()
    seen = [ask(world, chat)[:2] for chat in chats]
    tell(f"after its restart, [predicted, reported]: {seen}")
    assert all(predicted == reported > 4 * BLOCK for predicted, reported in seen)
