"""Ties a process to kvpin: the process gets a SIGTERM however kvpin ends. Only Linux can do that.

Run as a program, this file asks the kernel for the signal and then becomes the command; the kernel keeps the
request. It is a program of its own because kvpin has threads: after a fork, such a process must not run
Python. The kernel sends the signal when the thread that forked ends, so kvpin starts such processes from its
main thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # prctl(2)


def ends_with_parent(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` as a child of this process and stops it when this one ends."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> None:
    """Becomes `command`; returns at once if `parent` has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() != parent:
        return
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; the command must not
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], command)  # noqa: S606 - the operator's command, no shell


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
