"""The tokenizer of the fake engines: the default model's, through transformers, as real engines use it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import engine_adapter.torch_engine

MODEL_DIR = Path(engine_adapter.torch_engine.__file__).parent / "default_model"
VOCAB_SIZE = 4096


@cache
def tokenizer() -> Any:
    """Loaded once a process."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL_DIR)


def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
    return tokenizer()(text, add_special_tokens=add_special_tokens)["input_ids"]


def decode(token_ids: list[int]) -> str:
    return tokenizer().decode(token_ids)


def chat_text(messages: list[dict], tools: list[dict] | None = None, **options: object) -> str:
    """A chat as the template writes it; `options` are those of `apply_chat_template`.

    Raises:
        ValueError: messages of no known form.
    """
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages must be a list of messages")
    options.setdefault("add_generation_prompt", True)
    plain = [_plain(message) for message in messages]
    return tokenizer().apply_chat_template(plain, tools=tools, tokenize=False, **options)


def chat_tokens(messages: list[dict], tools: list[dict] | None = None, **options: object) -> list[int]:
    """As `chat_text`, in token ids."""
    return encode(chat_text(messages, tools, **options), add_special_tokens=False)


@cache
def words() -> tuple[int, ...]:
    """Token ids that are a piece of plain text each: an answer made of them is told token by token."""
    texts = ((token, decode([token])) for token in range(3, VOCAB_SIZE))
    return tuple(token for token, text in texts if text.isascii() and text.strip().isalpha())


def _plain(message: dict) -> dict:
    """Parts of text joined, arguments of tool calls read: what a template expects."""
    message = dict(message)
    if isinstance(message.get("content"), list):
        message["content"] = "\n".join(part["text"] for part in message["content"])
    if message.get("tool_calls"):
        message["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": _arguments(call)}}
            for call in message["tool_calls"]
        ]
    return message


def _arguments(call: dict) -> object:
    arguments = call["function"]["arguments"]
    return json.loads(arguments) if isinstance(arguments, str) else arguments
