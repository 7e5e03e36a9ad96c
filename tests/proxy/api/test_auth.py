import asyncio
import hashlib
import time
from contextlib import suppress

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


@pytest.mark.parametrize(("headers", "reason"), [({}, "is needed"), ({"x-api-key": "k3"}, "wrong API key")])
def test_a_wrong_key_is_not_repeated(headers, reason):
    with pytest.raises(Unauthorized, match=reason) as refused:
        authenticate(given(headers), TENANTS)
    assert "k3" not in str(refused.value)


def test_only_the_whole_key_learns_that_it_has_expired():
    now = time.time()
    keys = ApiKey.of("old", "alice", expires=now - 1), ApiKey.of("new", "alice", expires=now + 60)
    for key, said in (("old", "this API key has expired"), ("ol", "wrong API key")):
        with pytest.raises(Unauthorized, match=said):
            authenticate(given({"x-api-key": key}), Tenants(keys))
    assert authenticate(given({"x-api-key": "new"}), Tenants(keys)).tenant == "alice"


HASHED = f"sha256:{hashlib.sha256(b'admin-key').hexdigest()}"


class TestAdminWithAKey:
    @pytest.mark.parametrize("key", ["admin-key", HASHED])
    def test_the_key_opens_it_from_anywhere(self, key):
        away = {"client": ("10.1.2.3", 5), "host": "evil.example"}
        AdminGuard(key).check(connection(**away, authorization="Bearer admin-key"))
        AdminGuard(key).check(connection(**away, x_api_key="admin-key"))

    @pytest.mark.parametrize("authorization", ["", "Bearer ", "Bearer admin-ke", f"Bearer {HASHED}"])
    def test_nothing_else_does(self, authorization):
        with pytest.raises(Unauthorized):
            AdminGuard(HASHED).check(connection(host="localhost", authorization=authorization))

    async def test_wrong_keys_are_answered_slowly_and_told_once_a_minute(self, monkeypatch):
        monkeypatch.setattr(auth, "_WRONG_S", 0.02)
        guard = AdminGuard("admin-key")

        async def ask(**headers):
            with suppress(Unauthorized):
                await guard.admit(connection(**headers))
                return True
            return False

        with capture_logs() as logs:
            began = time.monotonic()
            wrong = asyncio.gather(*(ask(authorization=f"Bearer {n}") for n in range(5)))
            assert await ask(authorization="Bearer admin-key")
            assert not await ask()  # no guess
            assert not wrong.done()
            assert not any(await wrong)
            assert time.monotonic() - began >= 0.1
            assert 0 < guard._wrong._due.when() - asyncio.get_running_loop().time() <= 60
            guard._wrong._log()  # as it is then
        assert [entry["refused"] for entry in logs] == [1, 4]  # the last of a burst need no other after them


HERE = {"host": "localhost:8000"}
STRANGERS = {
    **{str(client): {"client": client, "host": "localhost"} for client in (
        ("10.0.0.1", 5), ("192.168.0.1", 5), ("fe80::1", 5), ("testclient", 5), None,
    )},
    **{host: {"host": host} for host in (
        "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "0.0.0.0:8000",
        "localhost:80:80", "localhost@evil",
    )},
    **{origin: {**HERE, "origin": origin} for origin in (
        "https://evil.example", "null", "", "http://localhost:8001", "https://localhost:8000", "http://localhost",
    )},
    **{f"{site} GET": {**HERE, "sec_fetch_site": site} for site in ("cross-site", "same-site")},
    "a rebound name": {
        "host": "evil.example:8000", "origin": "http://evil.example:8000", "sec_fetch_site": "same-origin",
    },
}  # fmt: skip


class TestAdminWithoutAKey:
    guard = AdminGuard(None)

    @pytest.mark.parametrize("host", ["LocalHost:8000", "127.0.0.1", "[::1]:8000", "[::1]", ""])
    @pytest.mark.parametrize("client", ["127.1.2.3", "::1"])
    def test_this_machine_gets_in(self, client, host):
        self.guard.check(connection(client=(client, 5), host=host))
        self.guard.check(connection(client=(client, 5)))

    @pytest.mark.parametrize("asks", STRANGERS.values(), ids=STRANGERS)
    def test_other_machines_and_web_pages_do_not(self, asks):
        with pytest.raises(Forbidden, match="answers only this machine"):
            self.guard.check(connection(**asks))

    @pytest.mark.parametrize("name", ["forwarded", "via", "x_forwarded_for", "x_forwarded_host", "x_real_ip"])
    def test_a_request_through_a_proxy_does_not(self, name):
        with pytest.raises(Forbidden, match="through a proxy"):
            self.guard.check(connection(host="localhost", **{name: ""}))

    @pytest.mark.parametrize("name", ["localhost:8000", "127.0.0.1:8000", "[::1]:8000"])
    def test_kvpins_own_page_does(self, name):
        self.guard.check(connection(host=name, origin=f"http://{name}", sec_fetch_site="same-origin"))
        self.guard.check(connection(host=name, sec_fetch_site="none"))


class TestMetrics:
    """`/metrics` shows what all tenants do."""

    @pytest.mark.parametrize(
        ("keys", "tenants"),
        [(("a", None), TENANTS), ((None, "m"), TENANTS), (("a", "m"), TENANTS), ((None, "m"), Tenants([]))],
    )
    @pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer k1"}])
    async def test_another_key_does_not_open_it(self, keys, tenants, headers):
        with pytest.raises(Unauthorized, match="/metrics needs the admin key or metrics_key"):
            await MetricsGuard(*keys, tenants).admit(connection(host="localhost", **headers))

    async def test_with_tenants_and_no_such_key_only_this_machine_may(self):
        guard = MetricsGuard(None, None, TENANTS)
        await guard.admit(connection(host="localhost"))
        with pytest.raises(Forbidden, match="/metrics answers only this machine"):
            await guard.admit(connection(client=("10.1.2.3", 5), host="localhost"))

    async def test_without_tenants_anybody_may_but_no_web_page(self):
        guard = MetricsGuard("admin-key", None, Tenants([]))
        await guard.admit(connection(client=("10.1.2.3", 5), host="kvpin.example", server=("10.1.2.4", 80)))
        for asks in ({"host": "evil.example:80"}, {"host": "localhost:80", "sec_fetch_site": "cross-site"}):
            with pytest.raises(Forbidden, match="/metrics answers no web page"):
                await guard.admit(connection(**asks))

    async def test_another_kvpin_always_may(self):
        for guard in (MetricsGuard("a", "b", TENANTS), MetricsGuard(None, None, Tenants([]))):
            peer = connection(host="evil.example", sec_fetch_site="cross-site")
            peer.scope[FROM_PEER] = True
            await guard.admit(peer)


SENT = {"authorization": "Bearer k1", "x-api-key": "k1", "cookie": "a=1", "x-other": "1"}
NAMED = {"x-request-id": "r", "x-data-parallel-rank": "1", "x-other": "1"}  # an engine's requests


@pytest.mark.parametrize(
    ("sent", "tenants", "passed_on"),
    [
        (SENT, TENANTS, {"x-other": "1"}),
        (SENT, Tenants([]), SENT),
        (NAMED, TENANTS, {"x-other": "1"}),
        (NAMED, Tenants([ApiKey.of("k1", "alice")]), NAMED),
        ({"x-api-key": "k", "x-other": "1"}, Tenants([]), {"x-other": "1", "authorization": "Bearer k"}),
    ],
    ids=["kvpin's key", "the engine's", "of several tenants", "of one", "as all engines take it"],
)
def test_what_an_engine_gets_of_a_clients_headers(sent, tenants, passed_on):
    assert passed_on_headers(given(sent), tenants) == passed_on
