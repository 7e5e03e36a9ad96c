import pytest

from proxy.api.admin.endpoint import decode
from proxy.api.admin.request_bodies import Drain, Flush, Offload, Pin, PutTable, Restore, Unpin, Warm

CLOSED = (Drain, Flush, Offload, Pin, PutTable, Restore, Unpin, Warm)


@pytest.mark.parametrize("kind", CLOSED)
def test_unknown_fields_are_refused(kind):
    assert kind.__struct_config__.forbid_unknown_fields


def test_defaults():
    body = decode(b'{"all": true}', Flush)
    assert (body.wait_s, body.engine) == (10.0, None)
    assert decode(b'{"prompt": "x"}', Pin).ttl_s == 3600
