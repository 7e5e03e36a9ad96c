"""The `kvpin engine` command. Importing this does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from engine_adapter.errors import EngineSpecError
from engine_adapter.torch_engine.serve import app

ENGINE_MODULE = "engine_adapter.torch_engine"
"""The module that `python -m` runs to serve an engine; `--help` lists its options."""


def run_engine_cli(args: Sequence[str], *, prog_name: str = "kvpin engine") -> None:
    """Runs the embedded engine with these command-line arguments; ends with SystemExit.

    Raises:
        EngineSpecError: torch is not installed.
    """
    if find_spec("torch") is None:
        raise EngineSpecError("the embedded engine needs torch: pip install 'kvpin[engine]'")
    app(args=list(args), prog_name=prog_name)


def embedded_command(words: Sequence[str], *, port: int) -> list[str]:
    """The command line of an embedded engine with the options `words`; it exits when standard input
    closes."""
    return [sys.executable, "-m", ENGINE_MODULE, "--exit-with-parent", "--port", str(port), *words]


def check_torch() -> None:
    """Raises EngineSpecError if torch is not installed."""
    if find_spec("torch") is None:
        raise EngineSpecError(
            "embedded engines need torch: pip install 'kvpin[engine]', or name an engine with --engine"
        )
