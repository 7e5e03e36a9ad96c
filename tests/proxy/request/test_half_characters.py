"""Halves of characters in bodies."""

import json
import time
from random import Random

import msgspec
import pytest

from proxy.request.bodies import parse, whole_characters


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (r'{"a": "x\ud83d"}', {"a": "x\ufffd"}),
        (r'{"a": "\udc00x"}', {"a": "\ufffdx"}),
        (r'{"\ud83d": "\uD83D\uDE00"}', {"\ufffd": "😀"}),
        (r'{"a": "\ud83d\ud83d\ude00\ude00"}', {"a": "\ufffd😀\ufffd"}),
        (r'{"a": "\ud83d\n\ude00"}', {"a": "\ufffd\n\ufffd"}),
        (r'{"a": "\ud83d\\ude00"}', {"a": "\ufffd\\ude00"}),
        (r'{"a": "\\ud83d", "b": "\\\ud83d"}', {"a": r"\ud83d", "b": "\\\ufffd"}),  # the first is just text
        (r'{"a": "\ud7ff\ue000\u00e9"}', {"a": "\ud7ff\ue000é"}),
    ],
)
def test_half_characters_are_replaced(sent, read):
    assert parse(sent.encode()).decoded() == read


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        (r'{"q": "x\ud83d"}', r'{"q": "x\ufffd"}'),
        (r'{"q": "\ud83d\ude00 \ude00"}', r'{"q": "\ud83d\ude00 \ufffd"}'),
        (r'{"q": "\\ud83d \\\ud83d"}', r'{"q": "\\ud83d \\\ufffd"}'),
    ],
)
def test_so_are_those_in_arguments_of_tool_calls(arguments, read):
    message = {"tool_calls": [{"function": {"arguments": arguments}}], "content": arguments}
    body = parse(msgspec.json.encode({"messages": [message]}))
    (message,) = body.get("messages")
    assert message["tool_calls"][0]["function"]["arguments"] == read
    assert message["content"] == arguments  # a text about such escapes stays as it is


def test_a_body_without_half_characters_keeps_its_bytes():
    raw = rb'{"a": "\ud83d\ude00", "b": "\\ud83d", "messages": [{"arguments": "\"\\u00e9\" \\ud83d\\ude00"}]}'
    assert parse(raw).raw is raw


def test_halves_are_found_as_python_finds_them():
    random = Random(7)  # noqa: S311 - a test
    pieces = ["\\", "\\\\", "\\ud83d", "\\ude00", "\\u00e9", "\\n", '\\"', "x", "é", "😀", "ud83d"]
    for _ in range(20_000):
        text = "".join(random.choices(pieces, k=random.randrange(1, 9)))
        raw = f'{{"a":"{text}"}}'
        try:
            value = json.loads(raw)["a"]
        except ValueError:
            continue
        got = parse(raw.encode()).get("a")
        assert got == "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in value), (
            raw,
            got,
        )


@pytest.mark.parametrize(
    "text", [rb"\ud83d\ude00", rb"\\ud83d", rb"\ud83d", b"\\\\" * 3, rb'"arguments":"', rb"\u00e9"]
)
def test_long_hostile_texts_are_read_in_time(text):
    raw = b'{"arguments":"' + text * ((1 << 20) // len(text)) + b'"}'
    began = time.process_time()
    whole_characters(raw)
    assert time.process_time() - began < 5  # linear: a quadratic search takes minutes
