import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter import JsonBody
from proxy.errors import BadRequest
from proxy.request.tenants import ApiKey, Tenants

SOME = st.text(min_size=1, max_size=8)
TWO = Tenants([ApiKey.of("k1", "alice"), ApiKey.of("k2", "bob"), ApiKey.of("k3", "bob")])
ONE = Tenants([ApiKey.of("k1", "alice"), ApiKey.of("k2", "alice")])
NONE = Tenants([])


def test_keys_are_not_kept():
    assert "k1" not in repr(ApiKey.of("k1", "alice"))
    assert b"k1" not in ApiKey.of("k1", "alice").digest


@pytest.mark.parametrize("tenants", [NONE, ONE])
def test_one_tenant_shares_and_its_own_salts_pass(tenants):
    assert tenants.salt("alice", None) is None
    assert tenants.salt("alice", "mine") == "mine"
    assert tenants.owner("mine") is None
    assert tenants.owner(TWO.salt("alice", None)) is None


@given(SOME, SOME, st.none() | SOME, st.none() | SOME)
def test_salts_are_equal_only_for_the_same_tenant_and_salt(one, two, salt_one, salt_two):
    same = (one, salt_one) == (two, salt_two)
    assert (TWO.salt(one, salt_one) == TWO.salt(two, salt_two)) is same


@given(st.sampled_from(["alice", "bob"]), st.none() | SOME)
def test_a_salt_tells_whose_it_is(tenant, salt):
    assert TWO.owner(TWO.salt(tenant, salt)) == tenant


@pytest.mark.parametrize("salt", [None, "mine", "kvpin-", TWO.salt("carol", None)])
def test_a_salt_of_no_tenant_has_no_owner(salt):
    assert TWO.owner(salt) is None


def test_a_client_cannot_ask_for_anothers_salt():
    wanted = TWO.salt("bob", None)
    assert TWO.salt("alice", wanted) != wanted
    assert TWO.owner(TWO.salt("alice", wanted)) == "alice"


@pytest.mark.parametrize("tenants", [NONE, TWO])
@pytest.mark.parametrize("salt", ["", 0, 1, False, [], {}, "x" * 1025])
def test_a_salt_is_a_string_with_something_in_it(tenants, salt):
    with pytest.raises(BadRequest) as refused:
        tenants.salt("alice", salt)
    assert refused.value.param == "cache_salt"


@pytest.mark.parametrize(
    ("text", "param"),
    [
        (b'{"model":"m","kv_transfer_params":{"a":1},"rid":"r"}', "kv_transfer_params"),
        (b'{"text":"a","bootstrap_pair_key":1}', "bootstrap_pair_key"),  # of SGLang's own pairs
        (b'{"text":"a","decode_tp_size":1}', "decode_tp_size"),
        (b'{"model":"m","vllm_xargs":{"kv_transfer_params":"x"}}', "vllm_xargs.kv_transfer_params"),
        (b'{"sampling_params":{"extra_args":{"kv_hints":1}}}', "sampling_params.extra_args.kv_hints"),
    ],
)
def test_of_several_tenants_none_reaches_into_an_engine(text, param):
    with pytest.raises(BadRequest, match=f"{param} is a field between servers") as refused:
        TWO.without_private(JsonBody(text))
    assert refused.value.param == param
    assert ONE.without_private(body := JsonBody(text)) is body


@pytest.mark.parametrize(
    "text",
    [
        b'{"vllm_xargs":{"session_id":"s","kv_transfer_params":null}}',
        b'{"vllm_xargs":"kv_transfer_params"}',
        b'{"sampling_params":{"extra_args":null,"kv_hints":1}}',
        b'{"sampling_params":[]}',
    ],
)
def test_other_fields_within_stay(text):
    body = JsonBody(text)
    assert TWO.without_private(body) is body


def test_what_makes_no_difference_to_the_answer_is_left_out():
    body = JsonBody(
        b'{"rid":["r"],"request_id":"r","kv_hints":{},"priority":-9,"kv_transfer_params":null,"model":"m"}'
    )
    assert set(msgspec.json.decode(TWO.without_private(body).raw)) == {"kv_transfer_params", "model"}
    plain = JsonBody(b'{"model":"m"}')
    assert TWO.without_private(plain) is plain
