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


def files_and_commands(text):
    """The files of a case as (name, content), and its commands as (None, words)."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("< "):
            yield line[2:], "".join(f"{each}\n" for each in iter(lines.__next__, "<"))
        elif line.startswith("$ "):
            yield None, line[2:]


def played(kvpin, text, known):
    """The case once more, with what its commands print now. `known`: what names stand for."""
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


@pytest.mark.parametrize("title", [title for title, text in cases().items() if "$KVPIN" not in text])
def test_commands_print_what_their_transcript_says(kvpin, tmp_path, monkeypatch, title):
    monkeypatch.chdir(tmp_path)
    known = {"$TRACES": str(TRACES), "$HERE": str(tmp_path)}
    check_golden(FILE, cases() | {title: played(kvpin, cases()[title], known)})


@pytest.mark.live
@pytest.mark.parametrize("title", [title for title, text in cases().items() if "$KVPIN" in text])
def test_what_a_real_kvpin_answers(kvpin, live_proxy, tmp_path, monkeypatch, title):
    monkeypatch.chdir(tmp_path)
    save_file({"t": np.full((16, 256), 0.5, np.float32)}, "table.safetensors")
    check_golden(FILE, cases() | {title: played(kvpin, cases()[title], {"$KVPIN": live_proxy})})
