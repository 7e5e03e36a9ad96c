import os
from collections import deque
from io import FileIO

import pytest
from structlog.testing import capture_logs

from proxy.fleet.managed_engine import MAX_LINE_BYTES, log_output


async def entries_of(*writes, keep=3, **options):
    reading, writing = os.pipe()
    with open(writing, "wb", buffering=0) as pipe:  # noqa: ASYNC230, PTH123 - a pipe with room enough
        pipe.writelines(writes)
    last_lines = deque(maxlen=keep)
    with capture_logs() as entries:
        output = FileIO(reading, "rb")
        await log_output(output, last_lines, engine="e-0", **{"is_ready": lambda: False, **options})
    assert output.closed
    assert all(entry["engine"] == "e-0" for entry in entries)
    lines = [entry["line"] for entry in entries]
    assert list(last_lines) == [line for line in lines if line not in INFORMATION][-keep:]
    return entries


async def logged(*writes, **options):
    return [entry["line"] for entry in await entries_of(*writes, **options)]


async def test_each_line_is_logged_with_the_engine():
    assert await logged(b"one\ntwo\n") == ["one", "two"]


async def test_lines_may_come_in_pieces_and_end_without_newline():
    assert await logged(b"on", b"e\r\ntw", b"o") == ["one", "two"]


async def test_progress_bars_and_colours():
    assert await logged(b"\x1b[31m 10%\x1b[0m\r 20%\r\n\n") == [" 10%", " 20%"]


async def test_what_is_not_utf8_is_kept_readable():
    assert await logged(b"caf\xe9\n") == ["caf\ufffd"]


async def test_an_endless_line_is_cut():
    lines = await logged(b"x" * (2 * MAX_LINE_BYTES + 3))
    assert [len(line) for line in lines] == [MAX_LINE_BYTES, MAX_LINE_BYTES, 3]


async def test_the_last_lines_are_kept():
    assert await logged(b"one\ntwo\nthree", keep=2) == ["one", "two", "three"]


INFORMATION = (
    "0.06.006.292 I slot launch_slot_: id  1 | task 0 | processing task",
    "INFO 11-23 05:12:10 [loggers.py:248] Engine 000: running: 1 reqs",
    "(APIServer pid=7) INFO:     127.0.0.1:80 - GET /health 200 OK",
    "2026-11-23 05:12:10,123 INFO kvpin.engine: loading the model",
)
OTHERS = (
    "0.06.006.292 W slot update_slots: the context is full",
    "0.06.006.292 E srv  send_error: no",
    "WARNING 11-23 05:12:10 [scheduler.py:1] the queue is long",
    "2026-11-23 05:12:10,123 WARNING kvpin.engine: the cache is full",
    "Traceback (most recent call last):",
)


@pytest.mark.parametrize("is_ready", [True, False])
async def test_what_an_engine_says_of_each_request_is_for_those_who_look_for_it(is_ready):
    said = [f"{line}\n".encode() for line in (*INFORMATION, *OTHERS)]
    entries = await entries_of(*said, keep=9, is_ready=lambda: is_ready)
    levels = {entry["line"]: entry["log_level"] for entry in entries}
    of_information = "debug" if is_ready else "info"
    assert levels == dict.fromkeys(INFORMATION, of_information) | dict.fromkeys(OTHERS, "info")
