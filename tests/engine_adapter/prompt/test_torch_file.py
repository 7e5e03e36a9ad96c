"""Tensors in the files of `torch.save`: plain ones are read, all others are refused, and no pickle is run."""

from __future__ import annotations

import io
import pickle
import zipfile
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.vllm.requests import NotPlainTensor, read_rows


def saved(value, **options):
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def bytes_of(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


WIDE = torch.randn(9, 300)


@pytest.mark.parametrize(
    "tensor",
    [
        WIDE,
        WIDE.bfloat16(),
        WIDE.double(),
        WIDE[2:5],  # saved with all nine rows
        WIDE[None],
        torch.randn(70_000, 2),
        torch.randn(3, 4).requires_grad_(),
    ],
)
def test_rows(tensor):
    rows = read_rows(saved(tensor))
    assert (rows.count, rows.row_bytes) == (tensor.shape[-2], tensor.shape[-1] * tensor.element_size())
    assert bytes(rows.values) == bytes_of(tensor)


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("it ran",)


@pytest.mark.parametrize(
    "value",
    [
        WIDE.T,
        WIDE[:, :2],
        WIDE[0],
        torch.randn(2, 3, 4),
        torch.randn(0, 4),
        torch.ones(3, 4, dtype=torch.int64),
        torch.nn.Parameter(WIDE),
        WIDE.to_sparse(),
        {"rows": WIDE},
        [WIDE, WIDE],
        Bomb(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused(value):
    with pytest.raises(NotPlainTensor):
        read_rows(saved(value))


def rewritten(content, change, compression=zipfile.ZIP_STORED):
    """The file with `change(name, data)` as the data of each entry; None leaves it out."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w", compression) as new:
        for name in old.namelist():
            data = change(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
    return file.getvalue()


@pytest.mark.parametrize(
    "change",
    [
        lambda name, data: None if "data/0" in name else data,
        lambda name, data: None if "data.pkl" in name else data,
        lambda name, data: data[:-4] if "data/0" in name else data,
        lambda name, data: b"big" if "byteorder" in name else data,
        lambda name, data: pickle.dumps(Bomb()) if "data.pkl" in name else data,
        lambda name, data: b"junk" if "data.pkl" in name else data,
        lambda name, data: data + b" " * 5000 if "data.pkl" in name else data,
        lambda name, data: data.replace(b"K\x09", b"K\xff") if "data.pkl" in name else data,
        lambda name, data: data.replace(b"K\x09", b"K\x00") if "data.pkl" in name else data,
        lambda name, data: data.replace(b"\x86", b"\x85") if "data.pkl" in name else data,
    ],
)
def test_changed_files_are_refused(change):
    with pytest.raises(NotPlainTensor):
        read_rows(rewritten(saved(WIDE), change))


def test_other_containers_are_refused():
    zeros = saved(torch.zeros(1000, 1000))
    for content in (
        b"",
        b"PK\x03\x04",
        saved(WIDE, _use_new_zipfile_serialization=False),
        rewritten(zeros, lambda _, data: data, zipfile.ZIP_DEFLATED),  # it would grow
    ):
        with pytest.raises(NotPlainTensor):
            read_rows(content)


FILE = saved(WIDE[:2, :2].clone())


@given(st.integers(0, len(FILE) - 1), st.binary(min_size=1, max_size=8))
def test_no_damage_does_more_than_be_refused(at, damage):
    content = FILE[:at] + damage + FILE[at + len(damage) :]
    with suppress(NotPlainTensor):
        read_rows(content)
