import pytest

from proxy.api.admin.endpoint import Drain, Flush, Offload, Pin, PutTable, Restore, Unpin, Warm

CLOSED = (Drain, Flush, Offload, Pin, PutTable, Restore, Unpin, Warm)


@pytest.mark.parametrize("kind", CLOSED)
def test_unknown_fields_are_refused(kind):
    assert kind.__struct_config__.forbid_unknown_fields
