import logging

import pytest
from structlog.testing import capture_logs

from proxy.server.tracing.complaints import EVERY_S, Complaints

REFUSED = (
    "Transient error HTTPConnectionPool(host='127.0.0.1', port=4318): Max retries exceeded (Caused by "
    'NewConnectionError("Failed to connect: [Errno 111] Connection refused")), retrying in 1.02s'
)


@pytest.mark.parametrize(("said", "error"), [(REFUSED, "Connection refused"), ("x" * 500, "x" * 120)])
def test_one_short_line_a_minute(said, error):
    now = 0.0
    complaints = Complaints(lambda: now)
    record = logging.LogRecord("opentelemetry.x", logging.ERROR, "", 0, said, (), None)
    with capture_logs() as lines:
        for now in (0.0, 1.0, EVERY_S - 1, EVERY_S, EVERY_S + 1):  # noqa: B007 - the clock
            complaints.emit(record)
    assert [line["error"] for line in lines] == [error] * 2


def test_they_are_taken_from_the_packages_that_complain():
    logger = logging.getLogger("opentelemetry")
    before = logger.handlers, logger.propagate
    try:
        Complaints.take()
        with capture_logs() as lines:
            logging.getLogger("opentelemetry.exporter.x").warning("no")
        assert [line["error"] for line in lines] == ["no"]
        assert not logger.propagate
    finally:
        logger.handlers, logger.propagate = before
