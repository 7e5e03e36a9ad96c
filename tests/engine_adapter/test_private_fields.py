"""The lists themselves; what kvpin does with them: tests/proxy/request/test_tenants.py."""

from engine_adapter.routes import OWN_IDS, PRIVATE_FIELDS, PRIVATE_HEADERS


def test_a_field_is_either_left_out_or_refused():
    assert not OWN_IDS & PRIVATE_FIELDS


def test_headers_are_in_lower_case():
    assert all(name == name.lower() for name in PRIVATE_HEADERS)
