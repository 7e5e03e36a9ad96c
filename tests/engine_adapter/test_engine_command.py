"""The door to the engine costs nothing until it is opened."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine_adapter import EngineSpecError, engine_command, run_engine_cli
from engine_adapter.engine_command import check_torch, embedded_command


def test_importing_the_facade_loads_no_torch():
    code = "import sys, engine_adapter; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.split() == ["False", "False"]


def test_help(capsys):
    with pytest.raises(SystemExit) as caught:
        run_engine_cli(["--help"])
    assert caught.value.code == 0
    assert "--tokens-per-block" in capsys.readouterr().out


def test_without_torch_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(engine_command, "find_spec", lambda name: None)
    with pytest.raises(EngineSpecError, match=r"kvpin\[engine\]"):
        run_engine_cli([])
    with pytest.raises(EngineSpecError, match="or name an engine with --engine"):
        check_torch()


def test_a_process_of_its_own_ends_with_its_parent():
    assert embedded_command(["--kv-blocks", "64"], port=4711) == [
        *(sys.executable, "-m", "engine_adapter.torch_engine", "--exit-with-parent"),
        *("--port", "4711", "--kv-blocks", "64"),
    ]
