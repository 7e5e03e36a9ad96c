"""Prompt tables, their identities, and clashes between them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save

from engine_adapter.errors import PromptTableError
from engine_adapter.prompt.extra_ids import parse_embeddings, prompt_table_extra_id
from engine_adapter.torch_engine.protocol import ApiError
from engine_adapter.torch_engine.service import PromptTables, parse_extra_id
from engine_adapter.types import extra_array, token_array

VOCAB, HIDDEN = 100, 4


def table(fill: float = 0.5, rows: int = 3, hidden: int = HIDDEN, dtype=torch.float32) -> bytes:
    return save({"t": torch.full((rows, hidden), fill, dtype=dtype)})


@pytest.fixture
def tables() -> PromptTables:
    return PromptTables(vocab_size=VOCAB, hidden_size=HIDDEN)


def resolve(tables, ids, explicit):
    return tables.resolve(token_array(ids), explicit=explicit, table_id=None)


def test_without_an_extra_id_the_content_gives_it(tables):
    stored, is_new = tables.keep(tables.read("a", table(), None))
    assert is_new
    assert stored.extra_id == prompt_table_extra_id(parse_embeddings(table(), param="x"))


@pytest.mark.parametrize(
    ("table_id", "data", "extra_id", "param"),
    [
        ("a", table(0.9), 7, "table_id"),
        ("a", table(), 8, "table_id"),
        ("b", table(0.9), 7, "extra_id"),
        ("b", table(dtype=torch.float64), 7, "extra_id"),
    ],
)
def test_clashes_are_conflicts(tables, table_id, data, extra_id, param):
    tables.keep(tables.read("a", table(), 7))
    with pytest.raises(ApiError) as caught:
        tables.keep(tables.read(table_id, data, extra_id))
    assert caught.value.status == 409
    assert caught.value.param == param


def test_an_extra_id_has_one_meaning_under_all_its_names_even_when_they_are_gone(tables):
    """KV computed from the old rows may still be cached under it."""
    tables.keep(tables.read("a", table(), 7))
    tables.keep(tables.read("b", table(), 7))
    assert tables.delete("a")
    assert resolve(tables, [100], explicit=[7]).extra_ids == extra_array([7])
    assert tables.delete("b")
    with pytest.raises(PromptTableError):
        resolve(tables, [100], explicit=[7])
    with pytest.raises(ApiError) as caught:
        tables.keep(tables.read("a", table(0.2), 7))
    assert caught.value.status == 409
    assert tables.keep(tables.read("a", table(), 7))[1]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        table(hidden=HIDDEN + 1),
        table(float("nan")),
        table(float("-inf"), dtype=torch.bfloat16),
        save({"t": torch.zeros(2, HIDDEN, dtype=torch.int64)}),
    ],
)
def test_bad_tables_are_the_clients_fault(tables, data):
    with pytest.raises(PromptTableError) as caught:
        tables.keep(tables.read("a", data, None))
    assert caught.value.param == "table"
    assert tables.by_id == {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_values_survive_in_their_type(tables, dtype):
    values = torch.arange(8, dtype=dtype).reshape(2, HIDDEN)
    tensor = tables.read("a", save({"t": values}), None).tensor
    assert tensor.dtype == dtype
    assert torch.equal(tensor, values)


def test_the_total_size_is_limited(tables, monkeypatch):
    monkeypatch.setattr("engine_adapter.torch_engine.service.MAX_TOTAL_BYTES", 100)
    tables.keep(tables.read("a", table(0.1), None))
    with pytest.raises(ApiError) as caught:
        tables.keep(tables.read("b", table(0.2, rows=4), None))
    assert caught.value.status == 413
    tables.delete("a")
    tables.keep(tables.read("b", table(0.2, rows=4), None))


@pytest.mark.parametrize("text", ["0", "-1", "", str(2**64), "9" * 5000, "٣"])
def test_bad_extra_ids(text):
    with pytest.raises(ApiError) as caught:
        parse_extra_id(text)
    assert caught.value.param == "extra_id"
