"""Log lines: structured, on standard error, never with prompt text or keys.

Code logs through `structlog.get_logger`; libraries that use `logging` come out in the same shape. What is
bound with structlog's contextvars (the request id) stands on every line of that request's task.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from proxy.settings import LogSettings

# Event fields that may carry what must not be logged. A call that names one is a mistake; the line is kept.
_HIDDEN = frozenset(
    {
        "admin_key", "api_key", "authorization", "body", "content", "cookie", "headers", "key", "messages",
        "password", "prompt", "secret", "text", "token_ids",
    }
)  # fmt: skip
# Their lines at `info` say what ours say, or a line for each request.
_QUIET_LIBRARIES = ("aiohttp.access", "httpx", "httpcore", "uvicorn.access")


def configure_logs(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Sets up structlog and `logging` for the process; may be called again.

    Args:
        settings: format and level.
        stream: where lines go, standard error by default.
    """
    stream = stream if stream is not None else sys.stderr
    pretty = settings.format == "pretty" or (settings.format == "auto" and stream.isatty())
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        hide_secrets,
    ]
    # Loggers are not cached on first use: what was made before this call follows it too.
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=_renderers(pretty, stream))
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    for name in _QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


def hide_secrets(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:  # noqa: ARG001 - structlog's
    """A structlog processor: fields that may hold prompts or keys become `[hidden]`."""
    for name in event.keys() & _HIDDEN:
        event[name] = "[hidden]"
    return event


def _is_news(record: logging.LogRecord) -> bool:
    """False for uvicorn's word on an answer that does not end: a stream is broken off on purpose when its
    engine dies, and that was logged with its reason."""
    return not record.getMessage().startswith("ASGI callable returned without completing response")


def _renderers(pretty: bool, stream: TextIO) -> list[Processor]:
    # Tracebacks without local variables: those hold prompts and keys.
    last: list[Processor]
    if pretty:
        colors = stream.isatty() and not os.environ.get("NO_COLOR")
        plain = structlog.dev.plain_traceback
        last = [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)]
    else:
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        last = [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]
    return [structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
