"""The temporary directory, which may be full."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from proxy.errors import NoMemory

log = structlog.get_logger(__name__)
_RETRY_S = 60


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """Around whatever writes there. Raises NoMemory if the directory does not take it."""
    try:
        yield
    except OSError as error:
        log.error(  # noqa: TRY400 - one sentence
            "the temporary directory does not take a request: it is refused",
            directory=tempfile.tempdir or "none can be written to",
            what=what,
            error=error.strerror,
        )
        raise NoMemory(
            f"kvpin has no room for {what} in its temporary directory", retry_after_s=_RETRY_S
        ) from error
