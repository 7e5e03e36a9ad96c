"""Keeps long computations off the event loop: a few threads of their own, which tenants share fairly.

A tenant has at most half of the threads. Work that waits for a thread is taken from the tenants in turn, so a
tenant waits for its own work, and for at most one piece of each other tenant's. All work is charged to the
tenant of the request: the context variable `PAYER`.

Only work that computes belongs here. What waits for a disk uses `asyncio.to_thread`: it would hold up these
threads. uvloop looks up names in threads of its own.

All threads share the interpreter's lock. An encoder releases it, and Python code gives it up every 0.5 ms
(`proxy/runtime.py`). A single call of a C function that keeps it still blocks the loop: decoding
1 MiB of JSON takes about 1 ms.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

# --- the shape of JSON, counted before it is decoded ----------------------------------------------------
# Decoding takes time and memory for each value, more than for each byte: 51 MiB of `[],` took 9 s and 1.8 GB.
# Here a body is read in pieces, with a few C calls for each. Between pieces, other threads may run.

# To decode as many takes up to 100 ms, in which no other Python code runs. A prompt of a million token ids
# has a million values; 128 tools with 500 fields each have half of the fields.
MOST_VALUES = 1_200_000
MOST_FIELDS = 131_072
MOST_TEXT = 16 << 20

# Bytes of a piece: the worst ones take 0.3 ms.
_PIECE = 16_384
_OPENING_ALONE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))


class JsonSize(NamedTuple):
    """The size of a body in values and fields: what its decoding costs.

    Attributes:
        values: entries of lists and objects.
        fields: fields of objects, and the lists and objects themselves; they cost ten times as much.
        text: bytes that are no data. Data are long strings without spaces, escapes and letters beyond ASCII,
            such as base64.
    """

    values: int = MOST_VALUES
    fields: int = MOST_FIELDS
    text: int = MOST_TEXT

    def above(self, most: JsonSize) -> str | None:
        """The first attribute that is above `most`; None if none is."""
        return next((name for name in self._fields if getattr(self, name) > getattr(most, name)), None)


_MOST_IN_STRINGS = JsonSize(text=sys.maxsize)
# Strings of so many characters together are not counted: to decode the worst ones takes 3 ms.
_FEW_CHARS = 32_768


def shape_of(raw: bytes, most: JsonSize) -> JsonSize:
    """The shape of a JSON text; of one above `most`, only as far as it was read. JSON that is wrong has the
    shape that a decoder would find up to the fault."""
    values = fields = text = inside = 0
    kept = b""
    for start in range(0, len(raw), _PIECE):
        piece = kept + raw[start : start + _PIECE]
        size, has_escapes = len(piece), b"\\" in piece
        if has_escapes:
            piece = piece.replace(b"\\\\", b"")
            kept = b"\\" if piece.endswith(b"\\") else b""  # it escapes the next piece's first byte
            piece = piece.replace(b'\\"', b"")
        else:
            kept = b""
        strings = piece.split(b'"')
        is_data = inside and len(strings) == 1 and not has_escapes and b" " not in piece and piece.isascii()
        text += 0 if is_data else size
        outside = b"".join(strings[inside::2])
        inside = (inside + len(strings) - 1) & 1
        values += outside.count(b",")
        fields += outside.count(b":") + outside.count(b"[") + outside.count(b"{")
        found = JsonSize(values, fields, text)
        if found.above(most) is not None:
            return found
    return JsonSize(values, fields, text)


def is_deeper(raw: bytes, levels: int) -> bool:
    """True if lists and objects of a JSON text lie more than `levels` deep within each other."""
    if raw.count(b"[") + raw.count(b"{") <= levels:
        return False
    strings = raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    brackets = b"".join(strings[::2]).translate(_OPENING_ALONE, _NO_BRACKETS)
    for _ in range(levels):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")  # all that hold no others
    return bool(brackets)


class JsonInStrings:
    """Counts the JSON in strings of one body, such as the arguments of tool calls, before it is decoded.
    Whoever counted the body's values skipped strings."""

    def __init__(self) -> None:
        self._chars = self._values = self._fields = 0

    def is_too_much(self, text: str) -> bool:
        """True if this string has, with those before it, more values or fields than a body usually may."""
        self._chars += len(text)
        if self._chars <= _FEW_CHARS:
            return False
        size = shape_of(text.encode(errors="surrogatepass"), _MOST_IN_STRINGS)
        self._values += size.values
        self._fields += size.fields
        return JsonSize(self._values, self._fields, 0).above(_MOST_IN_STRINGS) is not None


# --- off loop -------------------------------------------------------------------------------------------

_Result = TypeVar("_Result")

# Size of a body whose prompt is read in about 1 ms: as text, and as token ids.
JSON_BYTES_PER_MS = 256 * 1024
TOKEN_ID_BYTES_PER_MS = 48 * 1024
# Values of a body (`JsonBody.n_values`) that Python code looks at in about 1 ms. Whoever walks through a
# client's values asks by this price whether it may do so on the loop.
VALUES_PER_MS = 8192
# Bytes of a prompt table that are read and hashed in about 1 ms.
TABLE_BYTES_PER_MS = 256 * 1024
# Work that is expected to take longer leaves the loop.
MOST_MS = 1.0

# Threads of all tenants, and of one. Each thread that encodes holds caches of about 16 MB.
_EACH = min(2, os.cpu_count() or 1)
_ALL = 2 * _EACH

What = Literal["parse", "media", "render", "encode"]
"""Kinds of work: to read JSON and the prompt in it, look for images, make a chat's text, make token ids."""
PAYER: ContextVar[str | None] = ContextVar("payer", default=None)
"""The tenant whose request runs; None without one."""


@dataclass(frozen=True, slots=True)
class _Job:
    """Work that waits for a thread."""

    work: Callable[[], Any]
    what: What
    result: Future[Any]


class FairThreads:
    """Threads that tenants share fairly. Any thread may submit work. `on_loop`: CPU seconds by tenant and
    kind of work that was done on the loop instead. Only the loop's thread may use it, and `spent`."""

    def __init__(self, threads: int, each: int) -> None:
        """`each`: the most threads of one tenant."""
        self._in_threads: dict[tuple[str | None, What], float] = defaultdict(float)
        self.on_loop: dict[tuple[str | None, What], float] = defaultdict(float)
        self._threads, self._each = threads, each
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="off-loop")
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str | None, deque[_Job]] = OrderedDict()  # the next tenant comes first
        self._running: Counter[str | None] = Counter()

    @property
    def spent(self) -> dict[tuple[str | None, What], float]:
        """CPU seconds by tenant and kind of work. Those on the loop are estimated, which is faster."""
        spent = dict(self._in_threads)
        for key, seconds in self.on_loop.items():
            spent[key] = spent.get(key, 0.0) + seconds
        return spent

    def submit(self, tenant: str | None, what: What, work: Callable[[], _Result]) -> Future[_Result]:
        """The result of work in a thread. Work that is cancelled while it waits is not done."""
        result = Future[_Result]()
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append(_Job(work, what, result))
            self._start()
        return result

    def _start(self) -> None:
        """Lets free threads begin."""
        while self._running.total() < self._threads and (taken := self._next()) is not None:
            self._pool.submit(self._work, [taken])

    def _next(self) -> tuple[str | None, _Job] | None:
        """Takes work from the tenants in turn; None if none may run."""
        tenant = next((each for each in self._waiting if self._running[each] < self._each), _NOBODY)
        if tenant is _NOBODY:
            return None
        jobs = self._waiting[tenant]
        job = jobs.popleft()
        self._waiting.move_to_end(tenant)
        if not jobs:
            del self._waiting[tenant]
        self._running[tenant] += 1
        return tenant, job

    def _work(self, first: list[tuple[str | None, _Job]]) -> None:
        """Does the only one of `first`, then what waits: more threads would fill more encoders' caches. It is
        taken out: the pool keeps its arguments as long as an error's traceback, which leads to the pool."""
        taken: tuple[str | None, _Job] | None = first.pop()
        while taken is not None:
            taken = self._do(*taken)

    def _do(self, tenant: str | None, job: _Job) -> tuple[str | None, _Job] | None:
        """Does work; returns what this thread does next."""
        began, tell = time.thread_time(), None
        if job.result.set_running_or_notify_cancel():
            try:
                tell = partial(job.result.set_result, job.work())
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                tell = partial(job.result.set_exception, error)
        following = self._end(tenant, job.what, time.thread_time() - began)
        if tell is not None:
            tell()
        del job, tell  # an error's traceback holds this frame
        return following

    def _end(self, tenant: str | None, what: What, spent_s: float) -> tuple[str | None, _Job] | None:
        """Charges the tenant, and gives its thread to the next one."""
        with self._lock:
            self._in_threads[tenant, what] += spent_s
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]
            return self._next()


_NOBODY: Any = object()
THREADS = FairThreads(_ALL, _EACH)
"""The threads of this process."""


def may_stay(ms: float, what: What = "parse") -> bool:
    """True if work that takes about `ms` milliseconds may be done on the event loop, now: the tenant is
    charged for it. `off_loop` asks this, too; who asks it before saves a coroutine."""
    if ms > MOST_MS:
        return False
    THREADS.on_loop[PAYER.get(), what] += ms / 1000
    return True


async def off_loop(work: Callable[[], _Result], *, ms: float, what: What = "parse") -> _Result:
    """Does `work`, which takes about `ms` milliseconds: here if that is at most 1, else in a thread.

    Work that waits for a free thread is dropped if its caller is cancelled."""
    if may_stay(ms, what):
        return work()
    return await asyncio.wrap_future(THREADS.submit(PAYER.get(), what, work))


async def in_own_thread(work: Callable[[], _Result]) -> _Result:
    """Does `work` in a thread that ends after it, which frees what an encoder keeps for each thread."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="once")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, work)
    finally:
        thread.shutdown(wait=False)
