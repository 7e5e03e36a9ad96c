"""Which clients the embedded engine answers."""

import httpx
import pytest

from engine_adapter.torch_engine.server import EngineHost, create_app
from tests.engines import served

ROUTES = [("GET", "/kv/snapshot"), ("POST", "/kv/flush"), ("POST", "/detokenize"), ("GET", "/metrics")]
LOADING = 503  # what the app itself answers here: it has no engine


@pytest.fixture(scope="module")
def url():
    with served(create_app(EngineHost())) as url:
        yield url


def status(url, method="GET", path="/kv/info", **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.request(method, url + path, headers=headers, trust_env=False).status_code


@pytest.mark.parametrize(("method", "path"), [*ROUTES, ("GET", "/health")])
@pytest.mark.parametrize("headers", [{"origin": "null"}, {"sec_fetch_site": "same-site"}, {"host": "engine"}])
def test_no_web_page_is_answered(url, method, path, headers):
    assert status(url, method, path, **headers) == 403


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("headers", [{}, {"host": "engine.localhost"}, {"host": "10.1.2.3:80"}])
def test_programs_are(url, method, path, headers):
    assert status(url, method, path, **headers) == LOADING


def test_with_a_key_the_key_decides():
    with served(create_app(EngineHost(), key="key")) as locked:
        for method, path in ROUTES:
            assert status(locked, method, path) == 401
            assert status(locked, method, path, authorization="Bearer other") == 401
            assert status(locked, method, path, authorization=b"Bearer \xe9") == 401
            key = "Bearer key"
            assert status(locked, method, path, authorization=key, host="kvpin.example") == LOADING
        assert (status(locked, path="/health"), status(locked, path="/health/")) == (LOADING, 401)
        error = httpx.get(f"{locked}/kv/info", trust_env=False).json()["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
