import subprocess
import sys
from importlib.metadata import version

import pytest

from engine_adapter import run_engine_cli


def test_version(kvpin):
    result = kvpin("--version")
    assert (result.exit_code, result.output) == (0, f"kvpin {version('kvpin')}\n")


def test_without_a_command_it_shows_its_help(kvpin):
    result = kvpin()
    assert result.exit_code == 2
    commands = ("serve", "engine", "stats", "flush", "offload", "restore", "warm", "pin", "unpin", "route")
    for command in (*commands, "requests", "engines"):
        assert f"  {command} " in result.output


def test_importing_it_loads_no_server_and_no_model():
    heavy = ["torch", "transformers", "numpy", "starlette", "httptools", "pydantic", "httpx", "rich"]
    program = f"import sys, proxy.cli; print([m for m in {heavy} if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert output.stdout == "[]\n"


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m proxy.cli --help | head -1; exit ${{PIPESTATUS[0]}}"
    output = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert output.stdout.startswith("Usage:")
    assert "Traceback" not in output.stderr


def test_sizes_have_a_unit_in_the_help_of_the_engine(capsys):
    with pytest.raises(SystemExit):
        run_engine_cli(["--help"])
    assert "--kv-bytes SIZE " in capsys.readouterr().out
