"""The service's prompts, also those too long for the event loop."""

from __future__ import annotations

import pytest

from engine_adapter.errors import PromptTableError
from engine_adapter.torch_engine.protocol import ChatRequest, CompletionRequest


async def test_long_and_short_texts_are_tokenised_alike(served_engine):
    service = served_engine.service
    text = "One two three. " * 400  # too long for the event loop
    prompt = await service.prompt(CompletionRequest(prompt=text))
    assert prompt.token_ids == service.tokenizer.encode(text, add_special_tokens=True)
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    chat = await service.prompt(ChatRequest(messages=messages))
    assert chat.token_ids == service.tokenizer.chat(messages).token_ids


async def test_a_conversation_can_be_continued(served_engine):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    continued = await served_engine.service.prompt(
        ChatRequest(messages=messages, continue_final_message=True)
    )
    anew = await served_engine.service.prompt(ChatRequest(messages=messages))
    assert len(continued.token_ids) < len(anew.token_ids)
    assert anew.token_ids[: len(continued.token_ids)] == continued.token_ids


async def test_long_data_of_embeddings_is_not_read_on_the_event_loop(served_engine, monkeypatch):
    tokenizer, expected = served_engine.service.tokenizer, []

    async def off_loop(_self, chars, work):
        expected.append(chars / _self._encoder.chars_per_ms)
        return work()

    monkeypatch.setattr(type(tokenizer), "off_loop", off_loop)
    part = {"type": "prompt_embeds", "data": "A" * (8 << 20)}
    with pytest.raises(PromptTableError):  # it is no tensor
        await served_engine.service.prompt(ChatRequest(messages=[{"role": "user", "content": [part]}]))
    assert expected[0] > 1, "milliseconds"
