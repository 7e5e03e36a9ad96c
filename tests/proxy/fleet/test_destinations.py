"""Where a request may go. Over real sockets: tests/proxy/request/test_stored.py, test_response_homes.py."""

import msgspec
import pytest

from engine_adapter import Headers, JsonBody
from proxy.errors import Forbidden, ModelRefused, NotFound
from proxy.fleet.destinations import Destination, Destinations
from proxy.fleet.fleet import Fleet
from proxy.request.calls import Call
from tests.fakes import add_ready


def response(name, *, tenant=None, model="m"):
    body = JsonBody(b'{"model": "%b", "previous_response_id": "%b"}' % (model.encode(), name.encode()))
    return Call("r", "POST", "/v1/responses", Headers([]), body, tenant)


def reading(name, *, tenant=None):
    return Call("r", "GET", f"/v1/responses/{name}", Headers([]), None, tenant)


@pytest.fixture
def fleet():
    fleet = Fleet({"alias": "m"})
    add_ready(fleet, "a")
    return fleet


async def test_what_an_engine_of_another_model_keeps_is_not_reached(fleet):
    add_ready(fleet, "n", model="n")
    to, key = Destinations(fleet, ("t", "u")), frozenset({"alias"})
    to.note("t", "resp_m", "a")
    to.note("t", "resp_n", "n")
    assert (await to.find(msgspec.structs.replace(reading("resp_m", tenant="t"), models=key))).home == "a"
    going_on = response("resp_m", tenant="t", model="alias")
    assert (await to.find(msgspec.structs.replace(going_on, models=key))).home == "a"
    for call in (reading("resp_n", tenant="t"), response("resp_n", tenant="t", model="alias")):
        with pytest.raises(ModelRefused, match="for this key: "):
            await to.find(msgspec.structs.replace(call, models=key))
    with pytest.raises(NotFound, match="'resp_u' not found"):
        await to.find(msgspec.structs.replace(reading("resp_u", tenant="t"), models=key))


async def test_a_read_without_a_model_goes_to_the_one_model_of_its_key():
    fleet = Fleet({"alias": "m", "other": "m"})
    for name in "mn":
        add_ready(fleet, name, model=name)
    to = Destinations(fleet)

    def call(*models, method="GET", path="/props"):
        plain = Call("r", method, path, Headers([]), None)
        return msgspec.structs.replace(plain, models=frozenset(models) if models else None)

    for models in (("m",), ("alias",), ("m", "alias", "other"), ("m", "gone")):
        assert await to.find(call(*models)) == Destination(fleet.pools["m"], None)
        assert await to.find(call(*models, method="HEAD")) == Destination(fleet.pools["m"], None)
    assert (await to.find(call("n"))).pool.model == "n"
    for refused in (call("m", "n"), call("gone"), call("m", method="POST"), call("m", path="/v1/batches")):
        with pytest.raises((ModelRefused, Forbidden)):
            await to.find(refused)
    with pytest.raises(NotFound, match="model must be named"):
        await to.find(call())
    fleet.default_model = "n"
    assert (await to.find(call("m"))).pool.model == "m"  # not that of the default, which is another model's
    add_ready(fleet, "with-ada", model="m", loras=frozenset({"ada"}))  # it may show ada
    assert (await to.find(call("m", "ada"))).pool.model == "m"
    with pytest.raises(ModelRefused):
        await to.find(call("m"))
