"""Ids of each family are those of a real llama-server that reads the very same file."""

from __future__ import annotations

import functools
import random
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from engine_adapter.prompt.encoders import exact_encoder
from engine_adapter.prompt.gguf_tokenizer import _NEW, GgufError, has_new, load_gguf_tokenizer, read_metadata
from scripts.make_gguf import gguf_path
from tests.llama import running_llama_server

FAMILIES = ("gpt-2", "llama-bpe", "qwen2", "qwen35")
KEYS = "tokenizer.ggml."
TOOL_CALL, UNUSED = "<tool call>", "<unused>"
TEXTS = (
    "Hello, world!", " leading and trailing ", "I'll WE'LL it's IT'S don't 'tis 'S",
    "   \n \n\n\r\n\t\t  x   ", "1,234.56 ½ Ⅷ ٣٤ 百 x² H₂O 1234567", "def f(x):\n    return 1234567",
    "zażółć 漢字 🙂\n\n\t<|x|>", "İstanbul ſtraße ﬁn Ǆ Å Å e\u0301 ҈ हिन्दी ไทย 한국어 ﷺ",
    "👩\u200d👩\u200d👧 🏳️\u200d🌈 \ufeff\u200b\u00a0\u3000\x7f", "a" * 300 + " " * 300 + "\n" * 50,
    "<|im_start|>user\n<|im_end|> <|im_end|><|endoftext|>",
    f"a{TOOL_CALL}b {TOOL_CALL} <tool_call>", f"a{UNUSED}b",
)  # fmt: skip
PIECES = (
    *"aBé漢🙂Ωßก१٣½7 \t\n\r_-.<>|'\"/\\",
    *("  ", "\r\n", "e\u0301", "\u0300", "\u200d", "\ufe0f", "\u00a0", "\u3000", "\ufeff", "ﬁ", "İ", "ſ"),
    *("the", " the", "ing", "'s", "'LL", "123", "...", "</s>", "<|im_start|>", TOOL_CALL, "    ", "한국"),
)


def texts() -> Iterator[str]:
    yield from TEXTS
    mixed = random.Random(0)  # noqa: S311 - the same texts each time
    for _ in range(150):
        yield "".join(mixed.choices(PIECES, k=12))


@functools.cache
def tiny() -> tuple[dict[str, tuple[Any, ...]], list[Any]]:
    """The tiny model: its entries with their types, and its tensors."""
    reader = gguf.GGUFReader(gguf_path("tiny"))
    entries = {
        name: (field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None)
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.") and name != "general.architecture"
    }
    return entries, reader.tensors


def rewrite(path: Path, *, without: tuple[str, ...] = (), **changes: Any) -> Path:
    """The tiny model with other entries of its tokenizer, written to `path`."""
    entries, tensors = tiny()
    entries = {**entries, f"{KEYS}add_eos_token": (False, gguf.GGUFValueType.BOOL, None)}
    writer = gguf.GGUFWriter(path, "llama")
    for name, (value, kind, item) in entries.items():
        key = name.removeprefix(KEYS)
        if key not in without:
            writer.add_key_value(name, changes.get(key, value), kind, sub_type=item)
    for tensor in tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_other_tokens() -> dict[str, Any]:
    """The last two tokens, and the merges that make them, give way to one of a user and one not in use."""
    metadata = read_metadata(gguf_path("tiny"))
    tokens, kinds = metadata[f"{KEYS}tokens"], metadata[f"{KEYS}token_type"]
    tokens[-2:], kinds[-2:] = [TOOL_CALL, UNUSED], [gguf.TokenType.USER_DEFINED, gguf.TokenType.UNUSED]
    return {
        "tokens": tokens,
        "token_type": [int(kind) for kind in kinds],
        "merges": metadata[f"{KEYS}merges"][:-2],
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_the_servers(family, tmp_path):
    path = rewrite(tmp_path / "m.gguf", without=("add_bos_token",), pre=family, **with_other_tokens())
    ours = load_gguf_tokenizer(path)
    with (
        running_llama_server(tmp_path / "log", path, slots=1, ctx=512) as server,
        httpx.Client(base_url=server.url, trust_env=False) as client,
    ):
        for text in texts():
            for special in (True, False):
                body = {"content": text, "add_special": special, "parse_special": True}
                theirs = client.post("/tokenize", json=body).json()["tokens"]
                assert ours.encode(text, add_special_tokens=special) == theirs, text


KINDS = "a1!"  # a letter, a digit, another character: each makes one piece with its kind alone
CODE_POINTS = (*range(0x80, 0xD800), *range(0xE000, 0x32400), *range(0xE0000, 0xE01F0))


def with_first_bytes_merged() -> dict[str, Any]:
    """Each of `KINDS` makes a token with a first byte behind it: ids tell where pieces end."""
    metadata = read_metadata(gguf_path("tiny"))
    to_text = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    firsts = [to_text(chr(0x40 * first))[0][0][0] for first in range(2, 32)]  # two bytes
    firsts += [to_text(chr(max(0x1000 * first, 0x800)))[0][0][0] for first in range(16) if first != 13]
    firsts += [to_text(chr(0x40000 * first or 0x10000))[0][0][0] for first in range(4)]
    merges = [f"{kind} {first}" for kind in KINDS for first in firsts]
    kept = len(metadata[f"{KEYS}tokens"]) - len(merges)
    return {
        "tokens": [*metadata[f"{KEYS}tokens"][:kept], *(merge.replace(" ", "") for merge in merges)],
        "merges": [*merges, *metadata[f"{KEYS}merges"][: -len(merges)]],
    }


@pytest.mark.part(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_character_is_of_the_servers_kind(family, tmp_path):
    path = rewrite(tmp_path / "m.gguf", pre=family, **with_first_bytes_merged())
    ours = load_gguf_tokenizer(path)
    fast = exact_encoder(ours)
    assert fast.name == "fastokens"
    with (
        running_llama_server(tmp_path / "log", path, slots=1, ctx=512) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
    ):
        for kind in KINDS:
            for start in range(0, len(CODE_POINTS), 8192):
                text = " ".join(f"{kind}{chr(point)}" for point in CODE_POINTS[start : start + 8192])
                theirs = client.post("/tokenize", json={"content": text, "add_special": False}).json()[
                    "tokens"
                ]
                assert ours.encode(text, add_special_tokens=False) == theirs
                assert list(fast.encode(text, add_special_tokens=False)) == theirs


@pytest.mark.parametrize(
    ("family", "fields", "ids"),
    [
        ("gpt-2", {}, []),
        ("llama-bpe", {}, [0]),
        ("llama-bpe", {"add_bos_token": False}, []),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [0, 2]),
    ],
)
def test_what_is_put_around_a_text(tmp_path, family, fields, ids):
    without = () if fields else ("add_bos_token",)
    path = rewrite(tmp_path / "m.gguf", without=without, pre=family, **fields)
    assert load_gguf_tokenizer(path).encode("") == ids


@pytest.mark.parametrize(
    ("without", "fields", "message"),
    [
        ((), {"model": "llama"}, "its kind, 'llama' with 'gpt-2', cannot be read"),
        ((), {"pre": "falcon"}, "'gpt2' with 'falcon', cannot be read; known: 'gpt2' with gpt-2"),
        (("token_type",), {}, "it has no tokenizer.ggml.token_type"),
    ],
)
def test_a_tokenizer_that_is_not_read(tmp_path, without, fields, message):
    path = rewrite(tmp_path / "m.gguf", without=without, **fields)
    with pytest.raises(GgufError, match=message):
        load_gguf_tokenizer(path)


LIMITS = {"UINT8": 255, "INT8": -128, "UINT16": 2**16 - 1, "INT16": -(2**15)}
LIMITS |= {"UINT32": 2**32 - 1, "INT32": -(2**31), "UINT64": 2**64 - 1, "INT64": -(2**63)}
VALUES = {**LIMITS, "FLOAT32": 0.5, "FLOAT64": 0.1, "BOOL": True, "STRING": "zażółć 🙂\n"}
LISTS = {"l.ints": [1, -2, 3], "l.floats": [0.5, 1.5], "l.strings": ["a", "", "ż"], "l.flags": [True, False]}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind, value in VALUES.items():
        writer.add_key_value(f"a.{kind}", value, gguf.GGUFValueType[kind])
    for name, value in LISTS.items():
        writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_all_kinds_of_values_are_read_and_bytes_that_are_no_text_kept(path):
    values = {f"a.{kind}": value for kind, value in VALUES.items()}
    assert read_metadata(path) == {"general.architecture": "llama", **values, **LISTS}
    path.write_bytes(path.read_bytes().replace(b"llama", b"ll\xff\xfea", 1))
    kept = read_metadata(path)["general.architecture"]
    assert kept.encode(errors="surrogateescape") == b"ll\xff\xfea"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: b"", "no GGUF"),
        (lambda raw: raw[:4] + struct.pack("<I", 1) + raw[8:], "version 1 "),
        (lambda raw: raw[:40], "ends within"),
        (lambda raw: raw[:16] + struct.pack("<Q", 2**60) + raw[24:], "ends within"),
        (lambda raw: raw[:24] + struct.pack("<Q", 2**60) + raw[32:], "ends within"),
        (lambda raw: raw.replace(b"architecture\x08", b"architecture\x63"), "type 99 "),
    ],
)
def test_damage_is_told(path, change, message):
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(GgufError, match=message):
        read_metadata(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_no_damage_is_more_than_told(path, data):
    raw = bytearray(path.read_bytes())
    end = data.draw(st.integers(0, len(raw)))
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    damaged = path.with_suffix(".damaged")
    damaged.write_bytes(raw[:end])
    with suppress(GgufError):
        read_metadata(damaged)


def test_each_new_letter_is_found_and_no_usual_one():
    assert all(has_new(f"a漢{letter}b") for letter in _NEW.replace("-", ""))
    assert not has_new("zażółć 漢字 한국어 हिन्दी 🙂 𝐛 \ud83d \u0301\u2003")
