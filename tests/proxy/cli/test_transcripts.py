"""What commands print is what transcripts.txt says. A case is a title, files and commands; what a command
prints stands below it, with `!` before standard error and `=` before a status that is not 0. Outputs are made
anew by `RENEW=1`."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.golden import check_golden

TRACES = Path(__file__).parents[2] / "data" / "traces"
FILE = Path(__file__).with_name("transcripts.txt")


def cases():
    """Those of the file, by their titles."""
    parts = re.split("^# ", FILE.read_text("utf-8"), flags=re.MULTILINE)[1:]
    return dict(f"{part.strip()}\n".split("\n", 1) for part in parts)


@pytest.fixture
def place(request, tmp_path, monkeypatch):
    """A directory for each case, and what names stand for in its commands."""
    monkeypatch.setenv("COLUMNS", "100")

    def enter(is_live):
        here = tmp_path / f"{len([*tmp_path.iterdir()])}"
        here.mkdir()
        monkeypatch.chdir(here)
        save_file({"t": np.full((16, 256), 0.5, np.float32)}, "table.safetensors")
        known = {"$TRACES": str(TRACES), "$HERE": str(here)}
        return known | ({"$KVPIN": request.getfixturevalue("live_proxy")} if is_live else {})

    return enter


def files_and_commands(text):
    """The files of a case as (name, content), and its commands as (None, words)."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("< "):
            yield line[2:], "".join(f"{each}\n" for each in iter(lines.__next__, "<"))
        elif line.startswith("$ "):
            yield None, line[2:]


def played(kvpin, text, known):
    """The case once more, with what its commands print now."""
    said = []
    for name, content in files_and_commands(text):
        if name is not None:
            said += [f"< {name}", *content.splitlines(), "<"]
            Path(name).write_text(content, encoding="utf-8")
            Path(name).chmod(0o600)
            continue
        words = [re.sub(r"\$[A-Z]+", lambda name: known[name[0]], word) for word in shlex.split(content)]
        at = words.index("kvpin")
        done = kvpin(*words[at + 1 :], env=dict(word.split("=", 1) for word in words[:at]))
        said += [f"$ {content}", *(f"  {line}" for line in done.stdout.splitlines())]
        said += [f"! {line}" for line in done.stderr.splitlines()]
        said += [f"= {done.exit_code}"] if done.exit_code else []
    text = "".join(f"{line.rstrip()}\n" for line in said)
    for name, value in known.items():
        text = text.replace(value, name)
    return re.sub(r"after \d+\.\d s", "after … s", text)


@pytest.mark.parametrize("is_live", [False, pytest.param(True, marks=pytest.mark.live)])
def test_commands_print_what_the_transcripts_say(kvpin, place, is_live):
    known = cases()
    now = {
        title: played(kvpin, text, place(is_live))
        for title, text in known.items()
        if ("$KVPIN" in text) is is_live
    }
    check_golden(FILE, known | now)
