"""CORS on real sockets: which pages may use the data plane, and what they may read."""

import json

import httpx
import pytest

from proxy.request.tenants import ApiKey, Tenants
from proxy.server.app import Proxy, build_app
from proxy.settings import Settings
from tests.fakes import ASK, CHAT, STREAM, client_of, is_openai_error, proxy_over, serving

PAGE = "https://chat.example"
ASKS = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


@pytest.fixture
async def client(engine):
    """Sends as a page of PAGE, whose origin is one of two in the list. A key is needed."""
    tenants = Tenants([ApiKey.of("key", "t")])
    headers = {"origin": PAGE, "authorization": "Bearer key"}
    async with (
        proxy_over(engine, tenants=tenants, cors_origins=(PAGE, "http://localhost:3000")) as proxy,
        client_of(proxy, headers=headers) as client,
    ):
        client.proxy = proxy
        yield client
        await proxy.settled()


def of_cors(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


ALLOWED = {"access-control-allow-origin": PAGE, "access-control-expose-headers": "*"}


async def test_a_preflight_needs_no_key_and_lets_all_headers_be_sent(engine, client):
    response = await client.options(CHAT, headers={**ASKS, "authorization": ""})
    assert (response.status_code, response.content) == (204, b"")
    assert of_cors(response) == {
        **ALLOWED,
        "access-control-allow-methods": "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT",
        "access-control-allow-headers": ASKS["access-control-request-headers"],
        "access-control-max-age": "600",
    }
    assert response.headers["vary"] == "origin"
    assert not engine.seen


async def test_a_preflight_that_asks_for_no_header(client):
    response = await client.options(CHAT, headers={"access-control-request-method": "POST"})
    assert "access-control-allow-headers" not in response.headers


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://chat.example", f"{PAGE}:8443", "app://-", "null"]
)
async def test_a_page_that_is_not_listed_is_told_nothing(client, origin):
    response = await client.options(CHAT, headers=ASKS | {"origin": origin})
    assert is_openai_error(response, 403, "forbidden")
    told = "start it with --cors-origin '*'" if origin == "null" else f"--cors-origin {origin}"
    assert told in response.json()["error"]["message"]
    for answer in (response, await client.post(CHAT, json=ASK, headers={"origin": origin})):
        assert (of_cors(answer), answer.headers["vary"]) == ({}, "origin")


async def test_every_answer_may_be_read(engine, client):
    engine.script = None  # not reached
    for response, status in (
        (await client.post(CHAT, json=ASK, headers={"authorization": "Bearer wrong"}), 401),
        (await client.post(CHAT, json=ASK | {"model": "gpt-9"}), 404),
        (await client.get("/v1/%2e%2e/x"), 404),
        (await client.delete("/v1/models"), 405),
        (await client.post(CHAT, content=b" " * (2 << 20)), 413),
        (await client.get("/v1/models"), 200),
        (await client.get("/v1/models/m"), 200),
    ):
        assert (response.status_code, of_cors(response)) == (status, ALLOWED)


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
async def test_so_may_answers_of_engines_and_their_errors(engine, client, body):
    response = await client.post(CHAT, json=body)
    assert (response.status_code, of_cors(response)) == (200, ALLOWED)

    async def script(exchange):
        await exchange.send({"message": "no"}, status=429, headers=[("retry-after", "7")])

    engine.script = script
    response = await client.post(CHAT, json=body)
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    assert of_cors(response) == ALLOWED


async def test_an_engines_own_headers_of_cors_end_at_kvpin(engine, client):
    """A llama-server allows every page, and says so."""

    async def script(exchange):
        names = ("allow-origin", "allow-credentials", "allow-methods", "expose-headers", "max-age")
        await exchange.send({}, headers=[(f"access-control-{name}", "*") for name in names])

    engine.script = script
    assert of_cors(await client.post(CHAT, json=ASK)) == ALLOWED
    client.proxy.site.data_plane.cors.__init__(())
    assert of_cors(await client.post(CHAT, json=ASK)) == {}


async def test_all_pages(engine):
    async with proxy_over(engine, cors_origins=("*",)) as proxy, client_of(proxy) as client:
        for headers in ({}, {"origin": "null"}):
            response = await client.post(CHAT, json=ASK, headers=headers)
            assert of_cors(response) == ALLOWED | {"access-control-allow-origin": "*"}
            assert "vary" not in response.headers
        assert (await client.options(CHAT, headers=ASKS)).status_code == 204


async def test_without_the_setting_no_page_may(engine, proxy):
    async with client_of(proxy) as client:
        response = await client.options(CHAT, headers=ASKS)
        assert is_openai_error(response, 403, "forbidden")
        for answer in (response, await client.post(CHAT, json=ASK, headers={"origin": PAGE})):
            assert of_cors(answer) == {}
            assert "vary" not in answer.headers


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
