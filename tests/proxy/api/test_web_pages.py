"""Which web pages may use kvpin, over real sockets. tests/browser/test_hostile_pages.py has Chromium ask."""

import pytest

from proxy.request.tenants import ApiKey, Tenants
from tests.fakes import ASK, CHAT, client_of, is_openai_error, proxy_over

EVIL = "https://evil.example"


@pytest.fixture
async def client(proxy):
    async with client_of(proxy) as client:
        yield client
        await proxy.settled()


FORM = {"content-type": "text/plain", "origin": EVIL, "sec-fetch-site": "cross-site"}
PAGES = {
    "fetch without CORS": ("POST", CHAT, FORM, EVIL),
    "a form": ("POST", "/v1/embeddings", {**FORM, "origin": "null"}, "does not name"),
    "an engine's own route": ("POST", "/tokenize", FORM, EVIL),
    "a script": ("GET", "/v1/models", {"sec-fetch-site": "same-site"}, "does not name"),
    "a page of a rebound name": ("GET", "/v1/models", {"host": "evil.example:80"}, "http://evil.example:80"),
    "its chat": ("POST", CHAT, {"host": "evil.example", "origin": "http://evil.example"}, "evil.example"),
}


@pytest.mark.parametrize(("method", "path", "headers", "named"), PAGES.values(), ids=PAGES)
async def test_without_keys_no_page_gets_in(engine, client, method, path, headers, named):
    response = await client.request(method, path, json=ASK, headers=headers)
    assert is_openai_error(response, 403, "forbidden")
    assert named in response.json()["error"]["message"]
    assert not engine.seen


async def test_all_pages_do_where_all_are_listed(engine):
    async with proxy_over(engine, cors_origins=("*",)) as proxy, client_of(proxy) as client:
        for method, path, headers, _ in PAGES.values():
            assert (await client.request(method, path, json=ASK, headers=headers)).status_code != 403
        await proxy.settled()


async def test_a_page_that_is_listed_gets_in_under_any_name(engine):
    origins = ("https://chat.example", "http://kvpin.example")
    async with proxy_over(engine, cors_origins=origins) as proxy, client_of(proxy) as client:
        for headers in (
            {"origin": "https://chat.example", "sec-fetch-site": "cross-site"},
            {"origin": "https://chat.example", "host": "kvpin.example"},
            {"host": "kvpin.example"},  # a program, through a proxy on this machine
        ):
            assert (await client.post(CHAT, json=ASK, headers=headers)).status_code == 200
        assert (await client.get("/v1/models", headers={"host": "evil.example"})).status_code == 403
        await proxy.settled()


async def test_with_keys_the_key_decides(engine):
    """No page sends a key that it does not know."""
    tenants = Tenants([ApiKey.of("key", "t")])
    async with proxy_over(engine, tenants=tenants) as proxy, client_of(proxy) as client:
        for headers in ({"origin": EVIL, "sec-fetch-site": "cross-site"}, {"host": "kvpin.example"}):
            assert (await client.post(CHAT, json=ASK, headers=headers)).status_code == 401
            headers |= {"authorization": "Bearer key"}
            assert (await client.post(CHAT, json=ASK, headers=headers)).status_code == 200
        await proxy.settled()


@pytest.mark.parametrize("method", ["TRACE", "LOCK"])
@pytest.mark.parametrize("path", [CHAT, "/v1/files"])
async def test_no_engine_gets_a_method_that_no_api_has(engine, client, method, path):
    """The answer to TRACE would hold the key that kvpin sends to the engine."""
    response = await client.request(method, path)
    assert is_openai_error(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"
    assert not engine.seen
