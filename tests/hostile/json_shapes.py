"""JSON that takes much time or memory to read: many values, deep ones, long ones, odd ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

from tests.hostile.attacker import ANY, REFUSED, Attack, Attacker, Make, bodies, each
from tests.hostile.client import CHAT, COMPLETIONS, EMBEDDINGS, around, chat, post
from tests.hostile.place import BAD, BROKEN, LIMITED, TINY

_ODD = (-1, 2**70, 1e308, "x", [], {}, None, True, "\ud800", [None] * 99)
_FIELDS = ("max_tokens", "stop", "logit_bias", "top_logprobs", "seed", "tools", "stream", "priority")


def _listed(unit: bytes, size: int) -> bytes:
    """The unit again and again, with commas."""
    return b",".join(itertools.repeat(unit, size // (len(unit) + 1)))


def _list(name: str, unit: bytes, model: str = BROKEN) -> Make:
    """Chats with a field that is a long list."""
    return lambda size: around(model, name, b"[%b]" % _listed(unit, size))


def _object(name: str, unit: bytes, model: str = BROKEN) -> Make:
    """Chats with a field that is an object of many fields."""

    def make(size: int) -> bytes:
        fields = (b'"%x":%b' % (number, unit) for number in range(size // (len(unit) + 9)))
        return around(model, name, b"{%b}" % b",".join(fields))

    return make


def _text(name: str, letters: bytes) -> Make:
    """Chats with a field that is one long text."""
    return lambda size: around(BROKEN, name, b'"%b"' % (letters * (size // len(letters))))


def _deep(name: str, opening: bytes, closing: bytes) -> Make:
    return lambda size: around(BROKEN, name, opening * (size // 8) + b"1" + closing * (size // 8))


def _only(before: bytes, unit: bytes, after: bytes) -> Make:
    """Bodies that are a list, and what stands around it."""
    return lambda size: before + _listed(unit, size) + after


def _fields(size: int) -> bytes:
    names = (b'"%x":1' % number for number in range(size // 10))
    return chat(BROKEN, "hi")[:-1] + b"," + b",".join(names) + b"}"


def _parts_in_parts(size: int) -> bytes:
    part = b'[{"type":"image_url","uuid":"u","image_url":{"url":"u"},"content":'
    depth = min(size // 80, 50_000)
    content = part * depth + b"1" + b"}]" * depth
    return b'{"model":"broken","messages":[{"role":"user","content":%b}]}' % content


def _deep_arguments(size: int) -> bytes:
    texts = ("[" * size, "[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900)
    calls = [{"function": {"name": "f", "arguments": text}} for text in texts]
    message = {"role": "assistant", "tool_calls": calls}
    return json.dumps({"model": TINY, "messages": [message], "max_tokens": 2}).encode()


def _image(size: int) -> bytes:
    url = "data:image/png;base64," + "A" * size
    return chat(BROKEN, [{"type": "image_url", "image_url": {"url": url}}])


def _odd_values(_: Attacker) -> Iterator[bytes]:
    for name, value, model in itertools.product(_FIELDS, _ODD, (BROKEN, TINY)):
        yield post(CHAT, chat(model, "hi", **({"max_tokens": 2} | {name: value})), key=BAD)
    for value in _ODD:
        yield post(CHAT, json.dumps({"model": value, "messages": value}).encode(), key=BAD)


_TO_MOCK, _TO_TINY = b'{"model":"broken",', b'{"model":"kvpin-tiny",'
ATTACKS = (
    Attack("millions of fields", REFUSED, bodies(CHAT, _fields, 51)),
    Attack("millions of lists", ANY, bodies(CHAT, _list("x", b"[]"), 51)),
    Attack("millions of prompts", REFUSED,
           bodies(COMPLETIONS, _only(_TO_MOCK + b'"prompt":[', b'""', b"]}"), 51)),
    Attack("millions of entries in metadata", ANY, bodies(CHAT, _object("metadata", b'""'), 51)),
    Attack("JSON beyond the quota", ANY, bodies(CHAT, _fields, 20, 12, LIMITED)),
    Attack("chat_template_kwargs of 51 MiB", REFUSED,
           bodies(CHAT, _object("chat_template_kwargs", b"1", TINY), 51)),
    Attack("chat_template_kwargs of 25 MiB, four", REFUSED,
           bodies(CHAT, _object("chat_template_kwargs", b"[[]]", TINY), 25, 4)),
    Attack("parts in parts with uuids", REFUSED, bodies(CHAT, _parts_in_parts, 10)),
    Attack("a prompt_cache_key of 20 MiB", ANY, bodies(CHAT, _text("prompt_cache_key", b"k"), 20, 4)),
    Attack("a cache_salt of 20 MiB", ANY, bodies(CHAT, _text("cache_salt", b"s"), 20, 4)),
    Attack("a model's name of 20 MiB", REFUSED | {404},
           bodies(CHAT, lambda size: chat("m" * size, "hi"), 20, 4)),
    Attack("deep arguments of calls", ANY, bodies(CHAT, _deep_arguments, 10)),
    Attack("odd values of fields", ANY | {404, 501}, each(_odd_values)),
    Attack("deep JSON", ANY, bodies(CHAT, _deep("x", b"[", b"]"), 60)),
    Attack("deep objects of JSON", ANY, bodies(CHAT, _deep("metadata", b'{"a":', b"}"), 30)),
    Attack("millions of escapes", ANY, bodies(CHAT, _text("x", rb"\u0041"), 60)),
    Attack("a number of a million digits", ANY,
           bodies(CHAT, lambda size: around(BROKEN, "max_completion_tokens", b"9" * size), 10)),
    Attack("millions of messages", REFUSED,
           bodies(CHAT, _only(_TO_MOCK + b'"messages":[', b'{"role":"user"}', b"]}"), 51)),
    Attack("millions of stop strings", ANY, bodies(CHAT, _list("stop", b'"s"', TINY), 30)),
    Attack("millions of biases", ANY, bodies(CHAT, _object("logit_bias", b"1", TINY), 30)),
    Attack("millions of extra ids", ANY, bodies(CHAT, _list("extra_ids", b"1", TINY), 30)),
    Attack("millions of token ids", REFUSED,
           bodies(COMPLETIONS, _only(_TO_TINY + b'"max_tokens":2,"prompt":[', b"9", b"]}"), 51)),
    Attack("millions of texts to embed", REFUSED | {404, 501},
           bodies(EMBEDDINGS, _only(_TO_TINY + b'"input":[', b'"a"', b"]}"), 30)),
    Attack("an image of 40 MiB", ANY, bodies(CHAT, _image, 40, 4)),
)  # fmt: skip
