"""Writes a managed process's output to the log, line by line."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from io import FileIO

import structlog

log = structlog.get_logger(__name__)

MAX_LINE_BYTES = 8192
_CHUNK_BYTES = 65_536
_LINE_END = re.compile(rb"[\r\n]+")  # progress bars end lines with \r
# Lines that call themselves information: llama-server's, and those of Python's engines, with the time before.
_INFORMATION = re.compile(r"[\d.]+ [ID] |(?:\(.*?\) |\d{4}-\d\d-\d\d [\d:,]+ )?(?:INFO|DEBUG)\b")
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


async def log_output(
    output: FileIO, last_lines: deque[str], *, engine: str, is_ready: Callable[[], bool]
) -> None:
    """Logs each line that comes out of a pipe, with the engine's id, until the pipe ends.

    Lines beyond 8 KiB are split. The level is info. While the engine is ready, lines that call themselves
    information have the level debug: there are several for each request.

    `last_lines` gets each line that may say why a process ends, so none of information; its `maxlen` bounds
    it. The pipe is closed in the end.
    """

    def log_line(line: bytes) -> None:
        text = _COLOUR.sub("", line.decode(errors="replace")).rstrip()
        if text:
            is_information = _INFORMATION.match(text)
            if not is_information:
                last_lines.append(text)
            level = log.debug if is_ready() and is_information else log.info
            level("engine output", engine=engine, line=text)

    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), output
    )
    pending = b""
    try:
        while chunk := await reader.read(_CHUNK_BYTES):
            *lines, pending = _LINE_END.split(pending + chunk)
            for line in lines:
                log_line(line)
            while len(pending) > MAX_LINE_BYTES:
                log_line(pending[:MAX_LINE_BYTES])
                pending = pending[MAX_LINE_BYTES:]
    finally:
        transport.close()
        log_line(pending)
