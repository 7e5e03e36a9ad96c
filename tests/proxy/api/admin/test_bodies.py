import pytest

from engine_adapter import ENGINE_OPTIONS
from proxy.api.admin.app import ENDPOINTS
from proxy.api.admin.bodies import AddEngine, Flush, Pin
from proxy.api.admin.endpoint import decode
from proxy.settings import EngineSettings

CLOSED = {e.body for e in ENDPOINTS if e.body is not None and not e.open_body}


@pytest.mark.parametrize("kind", sorted(CLOSED, key=lambda kind: kind.__name__))
def test_unknown_fields_are_refused(kind):
    assert kind.__struct_config__.forbid_unknown_fields


def test_defaults():
    body = decode(b'{"all": true}', Flush)
    assert (body.wait_s, body.engine) == (10.0, None)
    assert decode(b'{"prompt": "x"}', Pin).ttl_s == 3600


def test_an_engine_is_described_in_full():
    options = {name for names in ENGINE_OPTIONS.values() for name in names}
    assert {*AddEngine.__struct_fields__} == {*EngineSettings.model_fields} | options
