from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from engine_adapter.torch_engine.model import load_model
from scripts.make_model import main, write_model


def test_the_same_seed_writes_the_same_model(tmp_path):
    for name in ("a", "b"):
        write_model(tmp_path / name, layers=1, hidden=32, heads=2, dtype="bfloat16")
    first, second = (list(load_model(str(tmp_path / name)).module.parameters()) for name in ("a", "b"))
    assert all(map(torch.equal, first, second))


def test_a_written_model_loads_with_its_tokenizer(tmp_path, capsys):
    arguments = ["--layers", "2", "--hidden", "64", "--heads", "4", "--kv-heads", "2", str(tmp_path / "m")]
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert done.value.code == 0
    model = load_model(str(tmp_path / "m"))
    assert model.layers == ((2, 16, 16),) * 2
    assert (model.hidden_size, model.vocab_size, model.default_max_tokens) == (64, 4096, 128)
    assert AutoTokenizer.from_pretrained(model.tokenizer).encode("x")
    assert "0.6M parameters" in capsys.readouterr().err
