"""What one tenant's request takes does not depend on what another tenant has sent.

Counted is the work: characters that are encoded, and blocks that are hashed. Times would be noise here.
"""

from dataclasses import replace

import pytest

from engine_adapter.prompt.chat import ChatTokenizer
from proxy.fleet import pool as pools
from proxy.request.tenants import ApiKey, Tenants
from tests.fakes import CHAT, INFO, FakeAdapter, FakeEngine, client_of, proxy_over

TWO = Tenants([ApiKey.of("k1", "alice"), ApiKey.of("k2", "bob")])
LONG = "The quick brown fox jumps over the lazy dog. " * 200
MESSAGES = [
    {"role": "system", "content": LONG},
    {"role": "user", "content": LONG[::-1]},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]
TOOL = {"type": "function", "function": {"name": "look", "description": LONG, "parameters": {}}}
PROMPTS = {
    "chat": (CHAT, {"messages": MESSAGES}),
    "chat with tools": (CHAT, {"messages": MESSAGES, "tools": [TOOL]}),
    "completion": ("/v1/completions", {"prompt": LONG}),
}


@pytest.fixture
def work(monkeypatch):
    """What has been done so far, as [characters encoded, blocks hashed]."""
    done, encode, chain = [0, 0], ChatTokenizer.encode, pools.chain

    def counted_encode(self, text, **options):
        done[0] += len(text)
        return encode(self, text, **options)

    def counted_chain(*prompt):
        made = chain(*prompt)
        done[1] += len(made.hashes) - len(prompt[-1])
        return made

    monkeypatch.setattr(ChatTokenizer, "encode", counted_encode)
    monkeypatch.setattr(pools, "chain", counted_chain)
    return done


@pytest.mark.parametrize("kind", PROMPTS)
async def test_a_prompt_is_as_much_work_as_if_nobody_had_sent_it(tokenizer_dir, work, kind):
    path, body = PROMPTS[kind]
    async with FakeEngine("a") as engine:
        adapter = FakeAdapter("a", engine.url, replace(INFO, tokenizer=str(tokenizer_dir)))
        async with proxy_over(adapter, reuse=True, tenants=TWO) as proxy, client_of(proxy) as client:

            async def took(key):
                before = list(work)
                headers = {"authorization": f"Bearer {key}"}
                answer = await client.post(path, json={"model": "m", **body}, headers=headers)
                assert answer.status_code == 200
                return [now - then for now, then in zip(work, before, strict=True)]

            alone = await took("k1")
            assert await took("k2") == alone
            again = await took("k1")
    assert all(alone)
    if path == CHAT:  # so the count sees what is known
        assert again[0] < alone[0]
        assert again[1] < alone[1]
