"""The check of architectures tells served, refused, wrong and not made apart; a few of each run here."""

from __future__ import annotations

import pytest

from scripts import check_models
from scripts.check_models import check


@pytest.mark.parametrize(
    ("kind", "ended", "reason"),
    [
        ("llama", "served", ""),
        ("deepseek_v3", "served", ""),
        ("gpt_oss", "refused", "sinks"),
        ("qwen3_next", "refused", "layers of kind linear_attention"),
        ("bert", "refused", "not causal"),
        ("gemma3", "not made", "not for text alone"),
    ],
)
def test_architectures_end_as_the_documentation_says(kind, ended, reason):
    verdict = check(kind)
    assert verdict.ended == ended, verdict
    assert reason in verdict.reason


def test_another_answer_than_transformers_own_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(check_models, "engine_answers", lambda _: [[1]])
    verdict = check("llama")
    assert verdict.ended == "wrong"
    monkeypatch.setattr(check_models, "check", lambda _: verdict)
    monkeypatch.setattr("sys.argv", ["check_models.py", "--only", "llama,llama"])
    assert check_models.main() == 1
    assert "2 wrong" in capsys.readouterr().out
