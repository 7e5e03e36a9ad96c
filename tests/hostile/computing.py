"""Requests that are short to send and long to compute: prompts to count, structures to compile, choices."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

from tests.hostile.attacker import ANY, MIB, REFUSED, Attack, Attacker, Make, bodies, each, same
from tests.hostile.client import CHAT, COMPLETIONS, COUNT, INPUT_TOKENS, MESSAGES, chat, post
from tests.hostile.place import BAD, LIMITED, TINY

_SENTENCE = "count these words "


def _counted(size: int) -> bytes:
    messages = [{"role": "user", "content": _SENTENCE * (size // len(_SENTENCE))}]
    return json.dumps({"model": TINY, "messages": messages}).encode()


def _counted_input(size: int) -> bytes:
    return json.dumps({"model": TINY, "input": _SENTENCE * (size // len(_SENTENCE))}).encode()


def _long(letters: str) -> Make:
    """Chats with one long message."""
    return lambda size: chat(TINY, letters * (size // len(letters.encode())), max_tokens=2)


def _structured(**structure: object) -> bytes:
    return post(CHAT, chat(TINY, "hi", max_tokens=8, structured_outputs=structure), key=BAD)


def _regexes(a: Attacker) -> Iterator[bytes]:
    """Each compiles, and is too large for the first mask. Those that failed need not be compiled again."""
    for number in range(a.many(50)):
        yield _structured(regex=f"((a{{{99 - number}}}){{99}}){{99}}")


def _named_call(schema: dict[str, Any]) -> bytes:
    tools = [{"name": "f", "input_schema": schema}]
    messages = [{"role": "user", "content": "x"}]
    fields = {"model": TINY, "max_tokens": 4, "messages": messages, "tools": tools}
    return post(MESSAGES, json.dumps(fields | {"tool_choice": {"type": "any"}}).encode(), key=BAD)


def _schemas(a: Attacker) -> Iterator[bytes]:
    pattern = {"type": "string", "pattern": "(a|b){1,99}"}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    for schema in (
        {"type": "object", "properties": {f"p{n}": pattern for n in range(600)}},
        deep,
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 50}}, "$ref": "#/$defs/a"},
        {"type": "string", "minLength": 2**30, "maxLength": 2**31},
        {"type": "array", "items": {"enum": list(range(5_000))}, "minItems": 10**6},
        {"allOf": [{"anyOf": [{"minimum": n}, {"maximum": -n}]} for n in range(100)]},
    ):
        yield _structured(json=schema)
        yield _named_call(schema)
    yield _structured(choice=[f"choice {n}" for n in range(4_000)])
    for number in range(a.many(40)):
        yield _structured(grammar="start: " + f"(a{number} " * 300 + ")~1..999" * 300)
        yield _structured(grammar=f'start: x{number}\nx{number}: x{number} x{number} | "a"')


def _pickles(_: Attacker) -> Iterator[bytes]:
    pickled = b"\x80\x04cposix\nsystem\n(S'true'\ntR."
    for raw in (pickled, b"PK\x03\x04" + bytes(1000), bytes(9), b"\xff" * MIB):
        text = base64.b64encode(raw).decode()
        fields = {"model": TINY, "prompt_embeds": text, "max_tokens": 2}
        yield post(COMPLETIONS, json.dumps(fields).encode(), key=BAD)


_OWN_TEMPLATE = chat(TINY, "hi", max_tokens=2, chat_template="{{ 'a' * 10**10 }}")
_CHOICES = chat(TINY, "word " * 2_000, n=128, max_tokens=1)
ATTACKS = (
    Attack("count_tokens of 60 MiB", REFUSED, bodies(COUNT, _counted, 60, 6)),
    Attack("input_tokens of 60 MiB", REFUSED, bodies(INPUT_TOKENS, _counted_input, 60, 6)),
    Attack("count_tokens beyond the quota", ANY, same(post(COUNT, _counted(30_000), key=LIMITED), 500)),
    Attack("regexes that explode", ANY, each(_regexes)),
    Attack("schemas and grammars that explode", ANY, each(_schemas, 8)),
    Attack("pickles as embeddings", ANY | {501}, each(_pickles)),
    Attack("a template in the request", ANY, same(post(CHAT, _OWN_TEMPLATE, key=BAD), 8)),
    Attack("128 choices of a long prompt", ANY, same(post(CHAT, _CHOICES, key=LIMITED), 8)),
    Attack("a word of 30 MiB", REFUSED, bodies(CHAT, _long("a"), 30, 4)),
    Attack("a text of combining marks", REFUSED, bodies(CHAT, _long("a\u0301\u0327\u0328"), 30)),
    Attack("words of 20,000 letters", ANY, same(post(CHAT, _long("a")(20_000), key=BAD), 60)),
)
