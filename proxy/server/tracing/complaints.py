"""Shortens the log of OpenTelemetry's packages, which complain of every attempt to send."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

import structlog

log = structlog.get_logger(__name__)

# Seconds between two lines.
EVERY_S = 60.0
_LOGGER = "opentelemetry"
_CAUSE = re.compile(r"\[Errno -?[0-9]+\] (?P<cause>[^\"')\]]+)")
_LONGEST = 120


class Complaints(logging.Handler):
    """Tells of the first record, and then of at most one in `EVERY_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._quiet_until: float | None = None

    @classmethod
    def take(cls) -> None:
        """Takes all records of these packages."""
        logger = logging.getLogger(_LOGGER)
        logger.handlers, logger.propagate = [cls()], False

    def emit(self, record: logging.LogRecord) -> None:
        """Logs the record, if none was logged in the last `EVERY_S`."""
        now = self._clock()
        if self._quiet_until is not None and now < self._quiet_until:
            return
        self._quiet_until = now + EVERY_S
        said = record.getMessage()
        found = _CAUSE.search(said)
        log.warning(
            "traces or metrics are not sent; kvpin goes on trying, and says so at most once a minute",
            error=found["cause"] if found else said[:_LONGEST],
        )
