"""Writes a managed process's output to the log, line by line."""

from __future__ import annotations

import asyncio
import os
import re
from collections import deque

import structlog

log = structlog.get_logger(__name__)

MAX_LINE_BYTES = 8192
_CHUNK_BYTES = 65_536
_LINE_END = re.compile(rb"[\r\n]+")  # progress bars end lines with \r
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


async def log_output(reading: int, last_lines: deque[str], *, engine: str) -> None:
    """Logs each line that comes out of the pipe `reading`, with the engine's id, until the pipe ends.

    Lines beyond 8 KiB are split.

    Args:
        reading: a file descriptor; this function closes it.
        last_lines: gets each line; its `maxlen` bounds it.
        engine: the engine's id.
    """
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", buffering=0)
    )
    pending = b""
    try:
        while chunk := await reader.read(_CHUNK_BYTES):
            *lines, pending = _LINE_END.split(pending + chunk)
            for line in lines:
                _log_line(line, last_lines, engine)
            while len(pending) > MAX_LINE_BYTES:
                _log_line(pending[:MAX_LINE_BYTES], last_lines, engine)
                pending = pending[MAX_LINE_BYTES:]
    finally:
        transport.close()
        _log_line(pending, last_lines, engine)


def _log_line(line: bytes, last_lines: deque[str], engine: str) -> None:
    text = _COLOUR.sub("", line.decode(errors="replace")).rstrip()
    if text:
        last_lines.append(text)
        log.info("engine output", engine=engine, line=text)
