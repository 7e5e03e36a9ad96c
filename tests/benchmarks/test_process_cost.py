"""The kernel's count of CPU time and memory, of a process and those it started."""

import subprocess
import sys

import pytest

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
child.communicate()
"""
BUSY = """
import sys, time
while time.process_time() < 0.1:
    pass
sys.stdin.read()
"""


@pytest.fixture
def family():
    command = [sys.executable, "-c", PARENT, BUSY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        yield parent.pid, int(parent.stdout.readline())
        parent.stdin.close()


def test_descendants_count(script, family):
    parent, child = family
    assert script.tree(parent) == [parent, child]
    while script.cpu_s(child) < 0.1:  # until then it may still be starting, with next to no memory
        pass
    alone = script.rss_mb(child)
    assert script.rss_mb(parent) > alone > 1
    assert script.cpu_s(parent) > script.cpu_s(child)


def test_a_process_that_ended_costs_nothing(script):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    assert (script.cpu_s(process.pid), script.rss_mb(process.pid)) == (0, 0)
