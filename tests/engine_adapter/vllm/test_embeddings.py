"""Prompts with embeddings, keyed as vLLM keys them: its own function is written out here."""

from __future__ import annotations

import base64
import hashlib
import io
from array import array

import pytest
import torch

from engine_adapter.errors import EngineRejected
from engine_adapter.vllm.requests import has_embeddings, render
from tests.engine_adapter.builders import body

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PLACE = 4096
ROWS = torch.randn(70, 8)


def encoded(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


def chat(*parts):
    return body(messages=[{"role": "user", "content": list(parts)}])


def part(tensor):
    return {"type": "prompt_embeds", "data": encoded(tensor)}


def keys_of(embeddings, block):
    """As `_gen_prompt_embeds_extra_hash_keys` of vLLM 0.32 makes them."""
    blocks = [(start, embeddings[start : start + block]) for start in range(0, len(embeddings), block)]
    return tuple((start, hashlib.sha256(rows.numpy().tobytes()).digest()) for start, rows in blocks)


def telling(*token_ids):
    """A server that makes these token ids of a chat."""

    async def tokenize(path, asked):
        if path == TEXT:
            assert asked.get("prompt") == "<prompt_embeds>"
            return array("i", [PLACE])
        return array("i", token_ids)

    return tokenize


@pytest.mark.parametrize(
    "given", [encoded(ROWS), [encoded(ROWS)], encoded(ROWS[None])], ids=["text", "list", "batch"]
)
async def test_a_completion(given):
    rendered = await render(TEXT, body(prompt_embeds=given), block=32, tokenize=telling())
    assert rendered.token_ids == array("i", [0] * 70)
    assert rendered.embeds == keys_of(ROWS, 32)


async def test_a_chat_with_text_between():
    zeros = torch.zeros(100, 8)
    ids = [*range(1, 81), PLACE, PLACE, PLACE, 81, 82, PLACE, PLACE, 83]
    rendered = await render(CHAT, chat(part(ROWS[:3]), part(ROWS[3:5])), block=16, tokenize=telling(*ids))
    assert rendered.token_ids == array("i", [0 if token == PLACE else token for token in ids])
    whole = torch.cat([zeros[:80], ROWS[:3], zeros[:2], ROWS[3:5], zeros[:1]])
    assert rendered.embeds == keys_of(whole, 16)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (TEXT, body(prompt_embeds=[encoded(ROWS), encoded(ROWS)])),
        (TEXT, body(prompt_embeds=encoded(ROWS), prompt="and a text")),
        (TEXT, body(prompt_embeds=[])),
        (TEXT, body(prompt_embeds="no base64")),
        (TEXT, body(prompt_embeds="AAAA")),
        (CHAT, chat(part(ROWS[:3]))),  # the server has room for two
        (CHAT, chat(part(ROWS[:1]), part(ROWS[:1].half()))),
        (CHAT, chat({"type": "prompt_embeds", "data": "AAAA"})),
    ],
)
async def test_what_cannot_be_known(path, asked):
    with pytest.raises(EngineRejected):
        await render(path, asked, block=32, tokenize=telling(1, PLACE, PLACE, 2))


def test_which_requests_have_embeddings():
    assert has_embeddings(TEXT, body(prompt_embeds="AAAA"))
    assert has_embeddings(CHAT, chat({"type": "text", "text": "Hi"}, part(ROWS)))
    for path, asked in (
        (TEXT, body(prompt="prompt_embeds", prompt_embeds=None)),
        (CHAT, chat({"type": "text", "text": "prompt_embeds"})),
        (CHAT, chat({"type": "text", "text": '"prompt_embeds"'})),
        (CHAT, body(messages=5, kind="prompt_embeds")),
        (CHAT, body(messages=[{"role": "user", "content": "Hi"}], kind="prompt_embeds")),
        ("/v1/responses", body(prompt_embeds="AAAA")),
    ):
        assert not has_embeddings(path, asked)
