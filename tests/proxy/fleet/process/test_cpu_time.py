"""CPU time of real processes."""

import os
import time

from proxy.fleet.process.cpu_time import CpuTime


def test_a_process_that_computes_is_told_from_one_that_waits():
    cpu = CpuTime(os.getpid())
    end_s = time.process_time() + 0.2
    while time.process_time() < end_s:
        pass
    assert cpu.is_used()
    time.sleep(0.3)
    assert not cpu.is_used()


def test_of_a_process_that_is_gone_nobody_knows():
    assert not CpuTime(2**22 + 1).is_used()
