"""Which web pages may use kvpin, and what they may read. tests/browser has Chromium ask, too."""

import json

import httpx
import pytest

from proxy.request.tenants import ApiKey, Tenants
from proxy.server.app import Proxy, build_app
from proxy.settings import Settings
from tests.fakes import ASK, CHAT, STREAM, client_of, is_openai_error, proxy_over, serving

PAGE, EVIL = "https://chat.example", "https://evil.example"
ASKS = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}
ALLOWED = {"access-control-allow-origin": PAGE, "access-control-expose-headers": "*"}
FORM = {"content-type": "text/plain", "origin": EVIL, "sec-fetch-site": "cross-site"}
PAGES = {
    "fetch with CORS": ("POST", CHAT, {"origin": PAGE}, PAGE),
    "its preflight": ("OPTIONS", CHAT, ASKS, PAGE),
    "fetch without CORS": ("POST", CHAT, FORM, EVIL),
    "a form": ("POST", "/v1/embeddings", {**FORM, "origin": "null"}, "does not name"),
    "an engine's own route": ("POST", "/tokenize", FORM, EVIL),
    "a script": ("GET", "/v1/models", {"sec-fetch-site": "same-site"}, "does not name"),
    "a page of a rebound name": ("GET", "/v1/models", {"host": "evil.example:80"}, "http://evil.example:80"),
    "its chat": ("POST", CHAT, {"host": "evil.example", "origin": "http://evil.example"}, "evil.example"),
}


def of_cors(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


@pytest.mark.parametrize(("method", "path", "headers", "named"), PAGES.values(), ids=PAGES)
async def test_without_keys_no_page_gets_in(engine, client, method, path, headers, named):
    response = await client.request(method, path, json=ASK, headers=headers)
    assert is_openai_error(response, 403, "forbidden")
    assert named in response.json()["error"]["message"]
    assert (of_cors(response), "vary" in response.headers) == ({}, False)
    assert not engine.seen


async def test_all_pages_do_where_all_are_listed(engine):
    async with proxy_over(engine, cors_origins=("*",)) as proxy, client_of(proxy) as client:
        for method, path, headers, _ in PAGES.values():
            response = await client.request(method, path, json=ASK, headers=headers)
            assert response.status_code not in (401, 403)
            assert of_cors(response).items() >= (ALLOWED | {"access-control-allow-origin": "*"}).items()
            assert "vary" not in response.headers
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


@pytest.fixture
async def page(engine):
    """Sends as a page of PAGE, whose origin is one of two in the list. A key is needed."""
    tenants = Tenants([ApiKey.of("key", "t")])
    headers = {"origin": PAGE, "authorization": "Bearer key"}
    async with (
        proxy_over(engine, tenants=tenants, cors_origins=(PAGE, "http://localhost:3000")) as proxy,
        client_of(proxy, headers=headers) as page,
    ):
        page.proxy = proxy
        yield page
        await proxy.settled()


async def test_a_preflight_needs_no_key_and_lets_all_headers_be_sent(engine, page):
    response = await page.options(CHAT, headers={**ASKS, "authorization": ""})
    assert (response.status_code, response.content) == (204, b"")
    assert of_cors(response) == {
        **ALLOWED,
        "access-control-allow-methods": "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT",
        "access-control-allow-headers": ASKS["access-control-request-headers"],
        "access-control-max-age": "600",
    }
    assert response.headers["vary"] == "origin"
    assert not engine.seen


async def test_a_preflight_that_asks_for_no_header(page):
    response = await page.options(CHAT, headers={"access-control-request-method": "POST"})
    assert "access-control-allow-headers" not in response.headers


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://chat.example", f"{PAGE}:8443", "app://-", "null"]
)
async def test_a_page_that_is_not_listed_is_told_nothing(page, origin):
    response = await page.options(CHAT, headers=ASKS | {"origin": origin})
    assert is_openai_error(response, 403, "forbidden")
    told = "start it with --cors-origin '*'" if origin == "null" else f"--cors-origin {origin}"
    assert told in response.json()["error"]["message"]
    for answer in (response, await page.post(CHAT, json=ASK, headers={"origin": origin})):
        assert (of_cors(answer), answer.headers["vary"]) == ({}, "origin")


async def test_every_answer_may_be_read(engine, page):
    engine.script = None  # not reached
    for response, status in (
        (await page.post(CHAT, json=ASK, headers={"authorization": "Bearer wrong"}), 401),
        (await page.post(CHAT, json=ASK | {"model": "gpt-9"}), 404),
        (await page.get("/v1/%2e%2e/x"), 404),
        (await page.delete("/v1/models"), 405),
        (await page.post(CHAT, content=b" " * (2 << 20)), 413),
        (await page.get("/v1/models"), 200),
        (await page.get("/v1/models/m"), 200),
    ):
        assert (response.status_code, of_cors(response)) == (status, ALLOWED)


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
async def test_so_may_answers_of_engines_and_their_errors(engine, page, body):
    response = await page.post(CHAT, json=body)
    assert (response.status_code, of_cors(response)) == (200, ALLOWED)

    async def script(exchange):
        await exchange.send({"message": "no"}, status=429, headers=[("retry-after", "7")])

    engine.script = script
    response = await page.post(CHAT, json=body)
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    assert of_cors(response) == ALLOWED


async def test_an_engines_own_headers_of_cors_end_at_kvpin(engine, page):
    """A llama-server allows every page, and says so."""

    async def script(exchange):
        names = ("allow-origin", "allow-credentials", "allow-methods", "expose-headers", "max-age")
        await exchange.send({}, headers=[(f"access-control-{name}", "*") for name in names])

    engine.script = script
    assert of_cors(await page.post(CHAT, json=ASK)) == ALLOWED
    page.proxy.site.data_plane.cors.__init__(())
    assert of_cors(await page.post(CHAT, json=ASK)) == {}


async def test_the_admin_api_allows_no_page(proxy):
    settings = Settings(cors_origins=("*",), admin_key="key")
    app = build_app(Proxy(settings, proxy.transport))
    async with serving(app) as url, httpx.AsyncClient(base_url=url, verify=False) as client:  # noqa: S501
        for method, path in (("GET", "/admin/v1/stats"), ("OPTIONS", "/admin/v1/stats"), ("GET", "/metrics")):
            headers = ASKS | {"authorization": "Bearer key"}
            assert of_cors(await client.request(method, path, headers=headers)) == {}
        response = await client.options("/v1/models", headers=ASKS)
        assert of_cors(response)["access-control-allow-origin"] == "*"
        assert json.loads((await client.get("/v1/models")).content)["data"] == []
