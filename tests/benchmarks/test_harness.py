"""Benchmarks as a newcomer runs them: with packages missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(("script", "missing"), [("slots.py", "gguf"), ("soak.py", "torch")])
def test_a_missing_package_is_named_with_what_to_install(tmp_path, script, missing):
    hidden = tmp_path / f"{missing}.py"
    hidden.write_text(f"raise ModuleNotFoundError(\"No module named '{missing}'\", name='{missing}')")
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, "--help"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == f"{script} needs '{missing}': pip install -e '.[dev,engine]'\n"


def test_other_errors_keep_their_traceback(monkeypatch, capsys):
    from harness import say_what_to_install

    monkeypatch.setattr(sys, "argv", ["slots.py"])
    say_what_to_install(ValueError, ValueError("odd"), None)
    assert capsys.readouterr().err == "ValueError: odd\n"
