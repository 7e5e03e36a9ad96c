"""Where a request may go. Over real sockets: tests/proxy/request/test_stored.py."""

from dataclasses import replace

import msgspec
import pytest

from engine_adapter import Headers, JsonBody
from engine_adapter.types import RESPONSES_ROUTES
from proxy.errors import Forbidden, ModelRefused, NotFound
from proxy.fleet.destinations import Destination, Destinations
from proxy.fleet.fleet import Fleet
from proxy.request.calls import Call
from tests.fakes import add_ready


def chat(model=None):
    body = b"{}" if model is None else b'{"model": "%b"}' % model.encode()
    return Call("r", "POST", "/v1/chat/completions", Headers([]), JsonBody(body))


def response(name, *, tenant=None, model="m"):
    body = JsonBody(b'{"model": "%b", "previous_response_id": "%b"}' % (model.encode(), name.encode()))
    return Call("r", "POST", "/v1/responses", Headers([]), body, tenant)


def reading(name, *, tenant=None):
    return Call("r", "GET", f"/v1/responses/{name}", Headers([]), None, tenant)


@pytest.fixture
def fleet():
    fleet = Fleet({"alias": "m", "also": "ada"})
    for name in ("a", "b"):
        add_ready(fleet, name, loras=frozenset({"ada"}))
    return fleet


async def test_a_request_goes_to_the_pool_of_its_model_under_the_engines_name_of_it(fleet):
    to = Destinations(fleet)
    pool = fleet.pools["m"]
    assert await to.find(chat("m")) == Destination(pool, "m")
    assert await to.find(chat("alias")) == Destination(pool, "m")
    assert await to.find(chat("also")) == Destination(pool, "ada")
    assert await to.find(chat()) == Destination(pool, None)
    with pytest.raises(NotFound, match="'nope' does not exist"):
        await to.find(chat("nope"))


async def test_a_response_leads_to_the_process_that_made_it_and_to_its_tenant_only(fleet):
    to = Destinations(fleet, ("t", "u"))
    to.note("t", "resp_1", "b")
    assert (await to.find(response("resp_1", tenant="t"))).home == "b"
    assert await to.find(response("resp_1", tenant="t", model="also")) == Destination(
        fleet.pools["m"], "ada", "b"
    )
    assert await to.find(reading("resp_1", tenant="t")) == Destination(fleet.pools["m"], None, "b")
    for call in (
        response("resp_1", tenant="u"),
        reading("resp_1", tenant="u"),
        reading("resp_2", tenant="t"),
    ):
        with pytest.raises(NotFound, match="not found"):
            await to.find(call)
    engine = fleet.engines["b"]
    engine.info = replace(engine.info, instance="another process")
    with pytest.raises(NotFound, match="engine 'b', which made it, was restarted"):
        await to.find(reading("resp_1", tenant="t"))


async def test_without_tenants_an_unknown_response_may_be_any_engines(fleet):
    to = Destinations(fleet)
    assert await to.find(response("resp_9")) == Destination(fleet.pools["m"], "m")
    assert await to.find(reading("resp_9")) == Destination(fleet.pools["m"], None)
    add_ready(fleet, "n", model="n")
    with pytest.raises(NotFound, match="'resp_9' not found"):
        await to.find(reading("resp_9"))  # of which model, nobody knows


async def test_where_kvpin_keeps_responses_no_engine_is_asked_for_one():
    fleet = Fleet()
    add_ready(fleet, "a", served_as_chats=RESPONSES_ROUTES)
    to = Destinations(fleet, ("t", "u"))
    assert (
        await to.find(response("resp_9", tenant="t"))
    ).home is None  # the translation says that there is none
    with pytest.raises(NotFound):
        await to.find(reading("resp_9", tenant="t"))


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
