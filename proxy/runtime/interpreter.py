"""Settings of the interpreter with which a busy kvpin does not stall.

Garbage collection. Python looks for reference cycles in new objects whenever their number has grown by 700,
and in all objects from time to time. With 64 requests at once, the number goes up and down by thousands.
Looking cost 100 µs per request, and each look at all objects blocked the loop for 80 ms. A request leaves
no cycles. So kvpin looks after a growth by 10,000, and never again at what was loaded at start.

The interpreter's lock. A thread that computes keeps the lock for up to 5 ms while the event loop waits, at
each event anew. With 0.5 ms, the loop serves three times as many events beside such a thread.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 10_000
_SWITCH_S = 0.0005


@contextmanager
def steady() -> Iterator[None]:
    """Runs its block with these settings."""
    thresholds, switch_s = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(_NEW_OBJECTS, *thresholds[1:])
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(switch_s)


def settle() -> None:
    """Exempts all that was loaded so far from garbage collection. Takes no time."""
    gc.freeze()
