import errno

import pytest
from structlog.testing import capture_logs

from proxy.errors import NoMemory
from proxy.request.bodies import room_for


def test_a_full_directory_is_told_to_client_and_operator():
    refused = pytest.raises(NoMemory, match="no room for the form in its temporary")
    with capture_logs() as lines, refused, room_for("the form"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert [line["error"] for line in lines] == ["No space left on device"]


def test_other_errors_stay_what_they_are():
    with pytest.raises(ValueError, match="other"), room_for("the form"):
        raise ValueError("other")
