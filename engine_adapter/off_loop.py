"""Keeps long computations off the event loop: a few threads of their own.

Only work that computes belongs here. What waits for a disk uses `asyncio.to_thread`: it would hold up these
threads. uvloop looks up names in threads of its own.

All threads share the interpreter's lock. An encoder releases it, and Python code gives it up every 0.5 ms
(`proxy/runtime/interpreter.py`). A single call of a C function that keeps it still blocks the loop: decoding
1 MiB of JSON takes about 1 ms.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Result = TypeVar("_Result")

# Size of a body whose prompt is read in about 1 ms: as text, and as token ids.
JSON_BYTES_PER_MS = 256 * 1024
TOKEN_ID_BYTES_PER_MS = 48 * 1024
# Bytes of a prompt table that are read and hashed in about 1 ms.
TABLE_BYTES_PER_MS = 256 * 1024
# Work that is expected to take longer leaves the loop.
MOST_MS = 1.0

# Each thread that encodes holds caches of about 16 MB.
_threads = ThreadPoolExecutor(min(2, os.cpu_count() or 1), thread_name_prefix="off-loop")


async def off_loop(work: Callable[[], _Result], *, ms: float) -> _Result:
    """Does `work`, which takes about `ms` milliseconds: here if that is at most 1, else in a thread.

    Work that waits for a free thread is dropped if its caller is cancelled.
    """
    if ms <= MOST_MS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads, work)


async def in_own_thread(work: Callable[[], _Result]) -> _Result:
    """Does `work` in a thread that ends after it, which frees what an encoder keeps for each thread."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="once")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, work)
    finally:
        thread.shutdown(wait=False)
