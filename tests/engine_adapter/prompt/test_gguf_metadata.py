"""What the writer of the format wrote is read; what is damaged is told."""

from __future__ import annotations

import struct
from contextlib import suppress

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_adapter.prompt.gguf_metadata import GgufError, read_metadata
from scripts.make_gguf import gguf_path

ENTRIES = {
    "a.uint8": (gguf.GGUFValueType.UINT8, 255),
    "a.int8": (gguf.GGUFValueType.INT8, -128),
    "a.uint16": (gguf.GGUFValueType.UINT16, 2**16 - 1),
    "a.int16": (gguf.GGUFValueType.INT16, -(2**15)),
    "a.uint32": (gguf.GGUFValueType.UINT32, 2**32 - 1),
    "a.int32": (gguf.GGUFValueType.INT32, -(2**31)),
    "a.uint64": (gguf.GGUFValueType.UINT64, 2**64 - 1),
    "a.int64": (gguf.GGUFValueType.INT64, -(2**63)),
    "a.float32": (gguf.GGUFValueType.FLOAT32, 0.5),
    "a.float64": (gguf.GGUFValueType.FLOAT64, 0.1),
    "a.bool": (gguf.GGUFValueType.BOOL, True),
    "a.string": (gguf.GGUFValueType.STRING, "zażółć 🙂\n"),
}
LISTS = {"l.ints": [1, -2, 3], "l.floats": [0.5, 1.5], "l.strings": ["a", "", "ż"], "l.flags": [True, False]}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, (kind, value) in ENTRIES.items():
        writer.add_key_value(name, value, kind)
    for name, value in LISTS.items():
        writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_all_kinds_of_values(path):
    assert read_metadata(path) == {
        "general.architecture": "llama",
        **{name: value for name, (_, value) in ENTRIES.items()},
        **LISTS,
    }


def test_a_model_with_tensors():
    metadata = read_metadata(gguf_path("tiny"))
    assert metadata["llama.block_count"] == 4
    assert len(metadata["tokenizer.ggml.tokens"]) == 4096


def test_a_string_that_is_no_text_is_kept(path):
    raw = path.read_bytes().replace(b"llama", b"ll\xff\xfea", 1)
    path.write_bytes(raw)
    text = read_metadata(path)["general.architecture"]
    assert text.encode(errors="surrogateescape") == b"ll\xff\xfea"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: b"", "no GGUF"),
        (lambda raw: b"GGML" + raw[4:], "no GGUF"),
        (lambda raw: raw[:4] + struct.pack("<I", 1) + raw[8:], "version 1 "),
        (lambda raw: raw[:4] + struct.pack(">I", 3) + raw[8:], "version 50331648 "),
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


def test_a_file_that_is_gone(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_metadata(tmp_path / "none.gguf")
