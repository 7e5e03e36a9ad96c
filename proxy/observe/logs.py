"""Log lines: structured, on standard error, without prompt text and without keys.

Code logs through `structlog.get_logger`. Lines of libraries that use `logging` get the same form. Values
bound with structlog's contextvars (the request id) are on every line of that request's task.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from functools import partial
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from proxy.settings import LogSettings

# Control characters but tabs and line ends.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Characters of a field that are written.
_MOST = 4_000
# Fields whose values must not be logged. To log one is a mistake; the line is kept, its value is hidden.
_HIDDEN = frozenset(
    {
        "admin_key", "api_key", "authorization", "body", "content", "cookie", "headers", "key", "messages",
        "password", "prompt", "secret", "text", "token_ids",
    }
)  # fmt: skip


def configure_logs(settings: LogSettings, stream: TextIO | None = None, *, worker: int | None = None) -> None:
    """Configures structlog and `logging` for the process. May be called again.

    Args:
        settings: format and level.
        stream: gets the lines, standard error by default.
        worker: this process's number, which is on every line; None where there is one process.
    """
    handler = logging.StreamHandler(stream) if stream is not None else _StandardError()
    stream = handler.stream
    pretty = settings.format == "pretty" or (settings.format == "auto" and stream.isatty())
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        hide_secrets,
        cut_long,
    ]
    if worker is not None:
        shared.append(partial(_number, worker))
    # Without the cache, loggers made before this call follow it too.
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=_renderers(pretty, stream))
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    # It tells of each request; kvpin makes many of its own.
    logging.getLogger("httpx").setLevel(logging.WARNING)


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what is standard error at that moment: a bar on the terminal takes its place for a while."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        """Ignored: `logging` sets it once."""


def hide_secrets(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:  # noqa: ARG001 - structlog's
    """A structlog processor: replaces fields that may hold prompts or keys by `[hidden]`."""
    for name in event.keys() & _HIDDEN:
        event[name] = "[hidden]"
    return event


def cut_long(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:  # noqa: ARG001 - likewise
    """A structlog processor: cuts fields that are too long for a line. Engines and clients may be quoted."""
    for name, value in event.items():
        if isinstance(value, str) and len(value) > _MOST:
            event[name] = f"{value[:_MOST]}… ({len(value)} characters)"
    return event


def _number(worker: int, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """A structlog processor: says which worker writes the line, where the line is not about one."""
    event.setdefault("worker", worker)
    return event


def escape_controls(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:  # noqa: ARG001 - likewise
    """A structlog processor for terminals: writes control characters out, except tabs and line ends.

    What clients and engines send gets into log lines, and could move the cursor or rename the window.
    """
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[name] = _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", value)
    return event


def _renderers(pretty: bool, stream: TextIO) -> list[Processor]:
    # Tracebacks have no local variables: those may hold prompts and keys.
    last: list[Processor]
    if pretty:
        colors = stream.isatty() and not os.environ.get("NO_COLOR")
        plain = structlog.dev.plain_traceback
        last = [escape_controls, structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)]
    else:
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        last = [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]
    return [structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
