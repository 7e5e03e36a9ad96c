import gzip
import json
import re
import shlex
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import typer
from safetensors.numpy import save_file

from proxy.cli.arguments import EXAMPLES
from proxy.cli.main import app
from proxy.server import run

TRACE = Path(__file__).parents[2] / "data" / "traces" / "agents.jsonl.gz"


INTERRUPTED = """
import os, signal, sys
class Finder:
    def find_spec(name, *_):
        if name == "proxy.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder)
import proxy.cli
"""


def test_ctrl_c_while_modules_load_ends_without_a_traceback():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def commands(group, words=()):
    """The words of every command."""
    for name, command in group.commands.items():
        yield " ".join((*words, name))
        yield from commands(command, (*words, name)) if hasattr(command, "commands") else ()


def test_every_command_has_one():
    assert set(EXAMPLES) == set(commands(typer.main.get_command(app))) - {"engine"}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A directory with the files that the examples name."""
    monkeypatch.chdir(tmp_path)
    text = " ".join(f"example {n} is shown." for n in range(40))
    Path("kvpin.toml").touch()
    Path("chat.json").write_text(json.dumps([{"role": "user", "content": text}]))
    save_file({"t": np.full((4, 256), 0.5, np.float32)}, "table.safetensors")
    with gzip.open(TRACE) as trace:
        lines = [{**json.loads(line), "text": {"ids": [1, 2]}} for line in islice(trace, 20)]
    Path("traffic.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.live
@pytest.mark.usefixtures("files")
def test_each_works(kvpin, live_proxy, embedded_engine, monkeypatch):
    monkeypatch.setenv("KVPIN_URL", live_proxy)
    monkeypatch.setenv("KVPIN_ADMIN_KEY", "secret")
    monkeypatch.setattr(run, "serve", lambda load: load() and 0)
    assert kvpin("warm", "--messages-file", "chat.json").exit_code == 0
    pinned = ""
    for command, line in EXAMPLES.items():
        here = line.replace("http://gpu-1:8000", embedded_engine.url).replace("pin-1", pinned or "pin-1")
        if command == "init":
            here += " --force"
        elif command == "bench":
            here = here.replace("http://127.0.0.1:8000", live_proxy)
        result = kvpin(*shlex.split(here)[1:])
        # The proxy of all tests issues no key, which would close it: it has no state_dir.
        assert result.exit_code == (command in ("keys add", "keys remove")), (here, result.output)
        if command == "pin":
            pinned = re.search(r"pin_id: (\S+)", result.stdout)[1]


PAGE = (Path(__file__).parents[3] / "docs" / "start.md").read_text(encoding="utf-8")


@pytest.mark.live
def test_the_program_prints_what_was_cached(live_proxy, capsys):
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(program.replace("http://127.0.0.1:8000", live_proxy), "start.md", "exec"), {})  # noqa: S102
    first, second = capsys.readouterr().out.splitlines()
    cached, tokens = map(int, re.fullmatch(r"(\d+) of (\d+) cached", second).groups())
    assert int(first.split()[0]) < cached < tokens
