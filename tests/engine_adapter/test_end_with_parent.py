"""Real processes; the whole of kvpin is in cli/test_serve.py."""

import os
import signal
import subprocess
import sys
import time

import pytest

from engine_adapter import end_with_parent
from engine_adapter.end_with_parent import ends_with_parent
from tests.processes import is_alive

PARENT = """
import subprocess, sys
from engine_adapter.end_with_parent import ends_with_parent
code = "import sys, time; print('up', flush=True); sys.stdout.close(); time.sleep(600)"
child = subprocess.Popen(ends_with_parent([sys.executable, "-c", code]), stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline(), sep="\\n", end="", flush=True)
child.wait()
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="a signal of Linux")


@linux
def test_a_child_ends_when_its_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    try:
        assert parent.stdout.readline() == "up\n"
        parent.kill()
        parent.communicate()
        deadline = time.monotonic() + 30
        while is_alive(child):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        if is_alive(child):
            os.kill(child, signal.SIGKILL)


@linux
def test_the_command_takes_the_place_of_what_starts_it():
    code = "import os, sys; print(os.getpid(), *sys.argv[1:])"
    child = subprocess.Popen(
        ends_with_parent([sys.executable, "-c", code, "a b", "--c"]), stdout=subprocess.PIPE, text=True
    )
    assert child.communicate()[0].split() == [str(child.pid), "a", "b", "--c"]
    assert child.returncode == 0


@linux
def test_a_signal_python_ignores_is_not_ignored_by_the_command():
    command = ["sh", "-c", "kill -PIPE $$; echo survived"]
    done = subprocess.run(ends_with_parent(command), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGPIPE, "")


@linux
def test_nothing_is_started_where_the_parent_has_ended_already(tmp_path):
    program, *options = ends_with_parent(["touch", str(tmp_path / "started")])
    options[options.index(str(os.getpid()))] = "1"  # not this process
    assert subprocess.run([program, *options], check=False).returncode == 0
    assert not (tmp_path / "started").exists()


def test_elsewhere_the_command_is_as_it_was(monkeypatch):
    monkeypatch.setattr(end_with_parent.sys, "platform", "darwin")
    assert ends_with_parent(["engine", "--port", "1"]) == ["engine", "--port", "1"]
