"""kvpin whose clocks stand still until the comparison moves them: all durations are the same each time.

    python -P clocked_kvpin.py FILE serve …

FILE holds the seconds since the start, as a double. Only kvpin's own code reads this clock: libraries and the
event loop keep the real one.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

EPOCH = 1_800_000_000.0
"""What kvpin's `time.time` says at the start: a day in January 2027."""
_OWN = ("proxy.", "engine_adapter.")


def main() -> None:
    """Runs kvpin."""
    with Path(sys.argv.pop(1)).open("rb") as file:
        clock = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)

    def of(real: Callable[[], float], start: float) -> Callable[[], float]:
        def now() -> float:
            name = sys._getframe(1).f_globals.get("__name__", "")
            return start + struct.unpack("d", clock[:8])[0] if name.startswith(_OWN) else real()

        return now

    time.monotonic, time.time = of(time.monotonic, 1000.0), of(time.time, EPOCH)
    with suppress(ImportError):  # of other versions
        from proxy.prompt import tokenizer

        tokenizer.ANSWER_S = 60.0  # kvpin waits 2 s by the real clock: a busy machine takes longer
    from proxy.cli import main as kvpin

    sys.argv[0] = "kvpin"
    kvpin()


if __name__ == "__main__":
    main()
