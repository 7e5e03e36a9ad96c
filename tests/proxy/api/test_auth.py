import asyncio
import hashlib
import time

import pytest
from starlette.requests import HTTPConnection
from structlog.testing import capture_logs

from engine_adapter import Headers
from proxy.api import auth
from proxy.api.auth import FROM_PEER, AdminGuard, MetricsGuard, authenticate, bearer, passed_on_headers
from proxy.errors import Forbidden, Unauthorized
from proxy.request.tenants import ApiKey, Tenants

TENANTS = Tenants([ApiKey.of("k1", "alice"), ApiKey.of("k2", "bob")])


def given(headers):
    return Headers.of(headers.items())


def connection(*, client=("127.0.0.1", 5), server=("127.0.0.1", 80), **headers):
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "scheme": "http", "client": client, "server": server, "headers": raw}
    return HTTPConnection(scope)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"authorization": "Bearer k1"}, "k1"),
        ({"authorization": "bearer  k1 "}, "k1"),
        ({"x-api-key": "k2"}, "k2"),
        ({"authorization": "Basic xx", "x-api-key": "k2"}, "k2"),
        ({"authorization": "Bearer k1", "x-api-key": "k2"}, "k1"),
        ({"authorization": "k1"}, ""),
        ({"authorization": "Bearer"}, ""),
        ({}, ""),
    ],
)
def test_the_key_a_client_sent(headers, key):
    assert bearer(given(headers)) == key


class TestAuthenticate:
    @pytest.mark.parametrize(
        ("headers", "reason"), [({}, "is needed"), ({"x-api-key": "k3"}, "wrong API key")]
    )
    def test_refuses_without_repeating_the_key(self, headers, reason):
        with pytest.raises(Unauthorized, match=reason) as refused:
            authenticate(given(headers), TENANTS)
        assert "k3" not in str(refused.value)

    def test_only_the_whole_key_learns_that_it_has_expired(self):
        ended, now = time.time() - 1, time.time()
        tenants = Tenants(
            [ApiKey.of("old", "alice", expires=ended), ApiKey.of("new", "alice", expires=now + 60)]
        )
        with pytest.raises(Unauthorized, match="this API key has expired"):
            authenticate(given({"x-api-key": "old"}), tenants)
        with pytest.raises(Unauthorized, match="wrong API key"):
            authenticate(given({"x-api-key": "ol"}), tenants)
        assert authenticate(given({"x-api-key": "new"}), tenants).tenant == "alice"


def test_a_hashed_admin_key_opens_the_admin_api_and_its_digest_does_not():
    hashed = f"sha256:{hashlib.sha256(b'admin-key').hexdigest()}"
    AdminGuard(hashed).check(connection(host="x", authorization="Bearer admin-key"))
    with pytest.raises(Unauthorized):
        AdminGuard(hashed).check(connection(host="x", authorization=f"Bearer {hashed}"))


class TestAdminWithAKey:
    guard = AdminGuard("admin-key")

    @pytest.mark.parametrize("client", [("127.0.0.1", 5), ("10.1.2.3", 5)])
    def test_the_key_opens_it_from_anywhere(self, client):
        self.guard.check(connection(client=client, authorization="Bearer admin-key", host="evil.example"))
        self.guard.check(connection(client=client, x_api_key="admin-key"))

    @pytest.mark.parametrize(
        "headers", [{}, {"authorization": "Bearer "}, {"authorization": "Bearer admin-ke"}]
    )
    def test_nothing_else_does(self, headers):
        with pytest.raises(Unauthorized):
            self.guard.check(connection(host="localhost", **headers))


async def test_wrong_keys_are_answered_slowly_and_told_once_a_minute(monkeypatch):
    """3,489 guesses a second left no trace."""
    monkeypatch.setattr(auth, "_WRONG_S", 0.02)
    guard = AdminGuard("admin-key")

    async def ask(**headers):
        try:
            await guard.admit(connection(**headers))
        except Unauthorized:
            return False
        return True

    with capture_logs() as logs:
        began = time.monotonic()
        wrong = asyncio.gather(*(ask(authorization=f"Bearer {n}") for n in range(20)))
        assert await ask(authorization="Bearer admin-key")
        assert not await ask()  # no guess
        assert time.monotonic() - began < 0.2
        assert not any(await wrong)
        assert time.monotonic() - began >= 0.4
        assert [entry["refused"] for entry in logs] == [1]
        guard._told -= 60
        await ask(x_api_key="1")
    assert [entry["refused"] for entry in logs] == [1, 20]


class TestAdminWithoutAKey:
    guard = AdminGuard(None)

    @pytest.mark.parametrize(
        "host", ["localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:80", "[::1]:8000", "[::1]", ""]
    )
    @pytest.mark.parametrize("client", ["127.0.0.1", "127.1.2.3", "::1"])
    def test_this_machine_gets_in(self, client, host):
        self.guard.check(connection(client=(client, 5), host=host))
        self.guard.check(connection(client=(client, 5)))

    @pytest.mark.parametrize(
        "client", [("10.0.0.1", 5), ("192.168.0.1", 5), ("fe80::1", 5), ("testclient", 5), None]
    )
    def test_others_do_not(self, client):
        with pytest.raises(Forbidden):
            self.guard.check(connection(client=client, host="localhost"))

    @pytest.mark.parametrize(
        "host",
        [
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "0.0.0.0:8000",
            "localhost:80:80",
            "localhost@evil",
        ],
    )
    def test_a_name_rebound_to_this_machine_does_not(self, host):
        with pytest.raises(Forbidden):
            self.guard.check(connection(host=host))

    @pytest.mark.parametrize(
        "name", ["forwarded", "via", "x_forwarded_for", "x_forwarded_proto", "x_forwarded_host", "x_real_ip"]
    )
    def test_a_request_through_a_proxy_does_not(self, name):
        with pytest.raises(Forbidden, match="through a proxy"):
            self.guard.check(connection(host="localhost", **{name: ""}))

    @pytest.mark.parametrize(
        "origin",
        [
            "https://evil.example",
            "null",
            "",
            "http://localhost:8001",
            "https://localhost:8000",
            "http://localhost",
        ],
    )
    def test_a_web_page_of_another_origin_does_not(self, origin):
        with pytest.raises(Forbidden):
            self.guard.check(connection(host="localhost:8000", origin=origin))

    @pytest.mark.parametrize("site", ["cross-site", "same-site"])
    def test_nor_does_its_get_which_has_no_origin(self, site):
        with pytest.raises(Forbidden):
            self.guard.check(connection(host="localhost:8000", sec_fetch_site=site))

    def test_nor_does_one_of_a_rebound_name_that_is_its_own_origin(self):
        headers = {"origin": "http://evil.example:8000", "sec_fetch_site": "same-origin"}
        with pytest.raises(Forbidden):
            self.guard.check(connection(host="evil.example:8000", **headers))

    @pytest.mark.parametrize("name", ["localhost:8000", "127.0.0.1:8000", "[::1]:8000"])
    def test_kvpins_own_page_does(self, name):
        self.guard.check(connection(host=name, origin=f"http://{name}", sec_fetch_site="same-origin"))
        self.guard.check(connection(host=name, sec_fetch_site="none"))


class TestMetrics:
    """`/metrics` shows what all tenants do."""

    @pytest.mark.parametrize("keys", [("admin-key", None), (None, "metrics-key"), ("a", "metrics-key")])
    @pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer k1"}])
    async def test_nothing_else_does(self, keys, headers):
        with pytest.raises(Unauthorized, match="/metrics needs the admin key or metrics_key"):
            await MetricsGuard(*keys, TENANTS).admit(connection(host="localhost", **headers))

    async def test_a_metrics_key_is_needed_without_tenants_too(self):
        guard = MetricsGuard(None, "metrics-key", Tenants([]))
        with pytest.raises(Unauthorized):
            await guard.admit(connection(host="localhost"))

    async def test_with_tenants_and_no_such_key_only_this_machine_may(self):
        guard = MetricsGuard(None, None, TENANTS)
        await guard.admit(connection(host="localhost"))
        with pytest.raises(Forbidden, match="/metrics answers only this machine"):
            await guard.admit(connection(client=("10.1.2.3", 5), host="localhost"))

    async def test_without_tenants_anybody_may_but_no_web_page(self):
        guard = MetricsGuard("admin-key", None, Tenants([]))
        await guard.admit(connection(client=("10.1.2.3", 5), host="kvpin.example", server=("10.1.2.4", 80)))
        with pytest.raises(Forbidden, match="/metrics answers no web page"):
            await guard.admit(connection(host="evil.example:80", server=("127.0.0.1", 80)))
        with pytest.raises(Forbidden, match="/metrics answers no web page"):
            await guard.admit(connection(host="localhost:80", sec_fetch_site="cross-site"))

    async def test_another_kvpin_always_may(self):
        for guard in (MetricsGuard("a", "b", TENANTS), MetricsGuard(None, None, Tenants([]))):
            peer = connection(host="evil.example", sec_fetch_site="cross-site")
            peer.scope[FROM_PEER] = True
            await guard.admit(peer)


def test_a_key_of_ours_ends_here_and_another_goes_to_the_engine():
    headers = given({"authorization": "Bearer k1", "x-api-key": "k1", "cookie": "a=1", "x-other": "1"})
    assert passed_on_headers(headers, TENANTS) == {"x-other": "1"}
    assert passed_on_headers(headers, Tenants([])) is headers


def test_of_several_tenants_none_names_the_requests_of_an_engine():
    named = {"x-request-id": "r", "x-data-parallel-rank": "1", "x-other": "1"}
    assert passed_on_headers(given(named), TENANTS) == {"x-other": "1"}
    assert passed_on_headers(given(named), Tenants([ApiKey.of("k1", "alice")])) == named


def test_a_key_of_the_engines_is_sent_as_all_engines_take_it():
    headers = passed_on_headers(given({"x-api-key": "k1", "x-other": "1"}), Tenants([]))
    assert headers == {"x-other": "1", "authorization": "Bearer k1"}
