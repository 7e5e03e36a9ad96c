"""CPU time of real processes."""

import subprocess
import sys
import time

from proxy.fleet.managed_engine import CpuTime

# Computes until a line comes, then waits until its input ends.
_COMPUTES_THEN_WAITS = """
import select, sys
while not select.select([sys.stdin], [], [], 0)[0]:
    pass
sys.stdin.read()
"""


def test_a_process_that_computes_is_told_from_one_that_waits():
    with subprocess.Popen(
        [sys.executable, "-c", _COMPUTES_THEN_WAITS], stdin=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        cpu = CpuTime(process.pid)
        assert _comes_to_be(cpu, used=True)
        process.stdin.write("wait\n")
        process.stdin.flush()
        assert _comes_to_be(cpu, used=False)


def test_of_a_process_that_is_gone_nobody_knows():
    assert not CpuTime(2**22 + 1).is_used()


def _comes_to_be(cpu: CpuTime, *, used: bool) -> bool:
    """True once a look says so: at 20 s at the latest, for on a busy machine the process waits for a core."""
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        time.sleep(0.3)
        if cpu.is_used() == used:
            return True
    return False
