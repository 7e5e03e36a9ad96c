"""Which headers a web page of another origin has."""

import socket

import pytest

from engine_adapter import Headers
from engine_adapter.http.web_pages import is_loopback, page_asking

HOSTNAME = socket.gethostname().partition(".")[0].lower()
EVIL = "https://evil.example"
HERE, ELSEWHERE = ("127.0.0.1", 8000), ("10.1.2.3", 8000)


def asking(host="localhost:8000", here=HERE, scheme="http", **headers):
    fields = {"host": host, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return page_asking(Headers.of(fields.items()), lambda: scheme, lambda: here)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("8.8.8.8", False),
        ("localhost", True),
        ("localhost.example", False),
        ("[::1]", True),
        ("", False),
    ],
)
def test_loopback_is_told_by_address(host, local):
    assert is_loopback(host) is local


class TestPageAsking:
    def test_a_program_is_no_page(self):
        assert asking() is None
        assert page_asking(Headers([]), lambda: "http", lambda: HERE) is None  # HTTP/1.0

    @pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1:8000", "[::1]:8000", HOSTNAME])
    def test_nor_is_the_page_of_kvpin_another(self, host):
        assert asking(host, origin=f"http://{host}", sec_fetch_site="same-origin") is None
        assert asking(host, sec_fetch_site="none") is None
        assert asking(host, scheme="https", origin=f"https://{host}") is None

    @pytest.mark.parametrize(
        "origin", [EVIL, "null", "", "http://localhost:8001", "https://localhost:8000", "http://localhost"]
    )
    def test_a_page_of_another_origin_is_named(self, origin):
        assert asking(origin=origin) == origin

    @pytest.mark.parametrize("site", ["cross-site", "same-site"])
    def test_its_pictures_and_scripts_do_not_name_it(self, site):
        assert asking(sec_fetch_site=site) == "null"

    @pytest.mark.parametrize("host", ["evil.example:8000", "EVIL.example", "127.0.0.1.evil.example:80"])
    def test_a_name_that_was_rebound_is_that_of_the_page(self, host):
        page = f"http://{host}".lower()
        assert asking(host) == asking(host, origin=page, sec_fetch_site="same-origin") == page
        assert asking(host, here=("::1", 8000)) == page

    @pytest.mark.parametrize(
        "host",
        [
            *("127.0.0.2:80", "0.0.0.0:8000", "10.1.2.3", "a.localhost", "host.docker.internal:8000"),
            *(f"{HOSTNAME}:8000", f"{HOSTNAME}.local", HOSTNAME.upper()),
        ],
    )
    def test_a_name_that_no_page_can_have_is_none(self, host):
        assert asking(host) is None

    @pytest.mark.parametrize(
        "host", ["kvpin:8000", "evil.local", f"a.{HOSTNAME}.local:80", "a.b.cluster.local"]
    )
    def test_a_name_that_a_neighbour_on_the_network_can_take(self, host, monkeypatch):
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        assert asking(host) == f"http://{host}"
        assert asking(host, here=ELSEWHERE) is None
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
        assert asking(host) is None

    @pytest.mark.parametrize("here", [ELSEWHERE, None])
    def test_nor_is_one_that_does_not_lead_to_this_machine_alone(self, here):
        assert asking("kvpin.example", here=here) is None
