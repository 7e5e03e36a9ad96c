"""What is forked is as what its command starts."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import msgspec
import pytest

from tests import forks
from tests.forks import Forked, start

WORDS = [("--version",), ("config", "show", "--port", "much"), ("serve", "--engine", "teapot"), ("nonsense",)]


def started(tmp_path, *words: str, **environment: str):
    """A `kvpin` that was started, and its output once it has ended."""
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = start("proxy.cli", *words, output=output, environment={**os.environ, **environment})
    process.wait(60)
    return process, log.read_text()


@pytest.mark.parametrize("words", WORDS, ids=lambda words: words[0])
def test_words_output_and_status_are_those_of_the_command(tmp_path, words):
    process, text = started(tmp_path, *words)
    assert isinstance(process, Forked)
    command = [sys.executable, "-m", "proxy.cli", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert (process.returncode, _plain(text)) == (done.returncode, _plain(done.stdout))


def _plain(text: str) -> str:
    return re.sub(r"python -m [\w.]+", "kvpin", text)


def test_where_imports_would_read_another_environment_the_command_is_run(tmp_path):
    process, _ = started(tmp_path, "--version", HF_HOME=str(tmp_path))
    assert isinstance(process, subprocess.Popen)
    assert process.returncode == 0


def test_who_asks_and_is_gone_at_once_ends_nothing(tmp_path):
    """A kvpin that is killed while it starts its tokenizer's loader."""
    path, order = forks._path_of("proxy.cli", os.environ), forks._Order(["--version"], {}, "/", [0, 1, 2], 9)
    for _ in range(20):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(path)
        socket.send_fds(connection, [msgspec.msgpack.encode(order)], [0, 1, 2])
        connection.close()
    assert started(tmp_path, "--version")[0].returncode == 0
