import pytest

from proxy.api.admin import endpoint
from proxy.api.admin.endpoint import (
    AddKey,
    Drain,
    Flush,
    Offload,
    Pin,
    PutTable,
    Restore,
    Unpin,
    Warm,
    decode,
)
from proxy.errors import BadRequest


@pytest.mark.parametrize(
    ("raw", "kind", "param"),
    [
        (b'{"all": 1}', Flush, "all"),
        (b'{"token_ids": [1, -2]}', Flush, "token_ids[1]"),
        (b'{"messages": [3]}', Flush, "messages[0]"),
        (b'{"everything": true}', Flush, "everything"),
        (b'{"wait_s": 61}', Flush, "wait_s"),
        (b'{"engine": ""}', Flush, "engine"),
        (b'{"ttl_s": 0}', Pin, "ttl_s"),
        (b"{}", Unpin, "pin_id"),
        *(
            (b'{"unknown": 1}', kind, "unknown")
            for kind in (Drain, Offload, Pin, PutTable, Restore, Unpin, Warm)
        ),
        (b'{"tenant": "no spaces"}', AddKey, "tenant"),
        (rb'{"tenant": "acme\n"}', AddKey, "tenant"),
        (b'{"models": []}', AddKey, "models"),
        (b'{"models": [" "]}', AddKey, "models[0]"),
        (b'{"models": [1]}', AddKey, "models[0]"),
        (rb'{"models": ["\u001b[2J m"]}', AddKey, "models[0]"),
        (b'{"models": [%b"m"]}' % (b'"m",' * 100), AddKey, "models"),
        (b'{"expires": "tomorrow"}', AddKey, "expires"),
        (b'{"expires": "2999-01-31T00:00:00"}', AddKey, "expires"),
        (b'{"name": "%b"}' % (b"x" * 65), AddKey, "name"),
        (rb'{"name": "\u001b[2J"}', AddKey, "name"),
        (rb'{"name": "\u009b2J"}', AddKey, "name"),
        (rb'{"name": "x\n"}', AddKey, "name"),
        (b'{"key": "mine"}', AddKey, "key"),
        (b"[]", Flush, None),
    ],
)
def test_a_wrong_body_names_its_field(raw, kind, param):
    with pytest.raises(BadRequest) as caught:
        decode(raw, kind)
    assert caught.value.param == param


@pytest.mark.parametrize("raw", [b"0", b"[]", b"{", b'{"all": NaN}', b'{"prompt": "\xff"}', b"[" * 100_000])
def test_what_is_no_json_is_told_so(raw):
    with pytest.raises(BadRequest, match=r"not valid JSON|must be a JSON object") as caught:
        decode(raw, Flush)
    assert caught.value.code == "invalid_json"


async def test_an_empty_body_is_an_empty_object(client):
    answer = await client.post("/flush")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "target")


async def test_a_body_over_the_limit(world, monkeypatch):
    monkeypatch.setattr(endpoint, "MAX_BODY_BYTES", 10)
    async with world.client() as client:
        answer = await client.post("/flush", json={"prompt": "x" * 20})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(("path", "known"), [("/requests", "only limit"), ("/stats", "none")])
async def test_a_query_parameter_that_does_not_exist(client, path, known):
    answer = await client.get(path, params={"tenent": "a"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tenent")
    assert error["message"] == f"there is no query parameter 'tenent'; this route takes {known}"


@pytest.mark.parametrize("limit", ["0", "x", "-1", "10001", "1.5", "٣", "9" * 5000, "0" * 11 + "1" * 5000])
async def test_a_wrong_number_in_the_query(client, limit):
    answer = await client.get("/requests", params={"limit": limit})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")
