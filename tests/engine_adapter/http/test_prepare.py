"""A client's request on its way to an engine."""

from __future__ import annotations

import ssl
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization as pem
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from engine_adapter import EngineSpecError, EngineUnavailable, HttpTransport
from engine_adapter.body import JsonBody, Upload
from engine_adapter.http.control import ControlClient
from engine_adapter.http.prepare import Headers, base_url, parts_of, prepare_request, tls_context
from engine_adapter.types import EngineSpec
from tests.engines import served


def spec(url="http://127.0.0.1:8000", **fields):
    return EngineSpec(kind="openai_compatible", url=url, id="e", **fields)


def prepared(headers):
    body = JsonBody(b'{"a" : 1}')
    return prepare_request(spec(), "POST", "/v1/chat/completions", headers, body)


@pytest.mark.parametrize(
    "url",
    ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"],
)
def test_addresses_with_and_without_v1(url):
    assert base_url(spec(url)) == "http://h:1"
    request = prepare_request(spec(url), "GET", "/v1/models", {}, JsonBody(b"{}"))
    assert request.url == "http://h:1/v1/models"


@pytest.mark.parametrize(
    "url", ["", "h:1", "ftp://h", "http://", "http://h?x=1", "http://h/#x", "http://h:port"]
)
def test_bad_addresses_are_named(url):
    with pytest.raises(EngineSpecError, match="engine 'e'"):
        base_url(spec(url))


async def test_an_unread_body_is_passed_through():
    async def parts():
        yield b"x"

    body = parts()
    request = prepare_request(spec(), "POST", "/v1/audio", {"content-length": "9"}, Upload(body))
    assert request.body is body
    assert b"content-length" not in dict(request.headers)
    request = prepare_request(spec(), "POST", "/v1/audio", {"content-length": "9"}, Upload(body, 1))
    assert dict(request.headers)[b"content-length"] == b"1"
    await body.aclose()


def test_headers_that_end_at_a_proxy():
    request = prepared(
        {
            "Host": "proxy",
            "Content-Length": "5",
            "Connection": "keep-alive, X-Hop",
            "X-Hop": "1",
            "Keep-Alive": "timeout=5",
            "Transfer-Encoding": "chunked",
            "TE": "trailers",
            "Upgrade": "h2c",
            "Proxy-Authorization": "Basic x",
            "Accept-Encoding": "gzip, br",
            "Authorization": "Bearer clients-own",
            "X-Kvpin-Session": "s",
            "x-request-id": "r1",
            "traceparent": "00-1",
            "Content-Type": "application/json",
        }
    )
    assert request.headers == [
        (b"authorization", b"Bearer clients-own"),
        (b"x-request-id", b"r1"),
        (b"traceparent", b"00-1"),
        (b"content-type", b"application/json"),
        (b"accept-encoding", b"identity"),
    ]


@pytest.mark.parametrize(
    ("own", "clients", "sent"),
    [
        (
            {"api_key": "kvpins"},
            {"Authorization": "Bearer clients", "X-Api-Key": "clients"},
            [(b"authorization", b"Bearer kvpins")],
        ),
        (
            {"headers": {"X-Team": "kvpins", "authorization": "Basic kvpins"}},
            {"x-team": "clients", "Authorization": "Bearer clients"},
            [(b"x-team", b"kvpins"), (b"authorization", b"Basic kvpins")],
        ),
    ],
    ids=["key", "headers"],
)
def test_the_engines_own_take_the_place_of_the_clients(own, clients, sent):
    request = prepare_request(spec(**own), "GET", "/v1/models", clients, None)
    assert request.headers == [(b"accept-encoding", b"identity"), *sent]
    assert "kvpins" not in repr(request) + repr(spec(**own))


def test_headers_that_come_twice_go_twice():
    twice = [(b"via", b"1.1 a"), (b"via", b"1.1 b")]
    request = prepared(Headers([*twice, (b"connection", b"x-hop"), (b"x-hop", b"1")]))
    assert request.headers == [*twice, (b"accept-encoding", b"identity")]


def test_an_address_must_not_hold_a_password():
    with pytest.raises(EngineSpecError, match="use api_key or headers") as caught:
        base_url(spec(url="http://user:secret@h:1"))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"Content-Length": "hush"}, "kvpin sets 'Content-Length' itself: leave it out"),
        ({"a b": "hush"}, "'a b' is not a header name"),
        ({"a": "hush\r\nb: c"}, "'a' has a value that is not printable ASCII"),
        ({"a": ""}, "'a' has a value that is not printable ASCII"),
    ],
)
def test_wrong_headers_are_named_without_their_values(headers, message):
    with pytest.raises(EngineSpecError, match=message) as caught:
        parts_of(spec(headers=headers))
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("key", ["hush\n", "hüsh", " hush", "hu\0sh"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_repeated(key):
    with pytest.raises(EngineSpecError, match="api_key is not printable ASCII") as caught:
        parts_of(spec(api_key=key))
    assert key.strip() not in str(caught.value)


APP = Starlette(routes=[Route("/health", lambda request: JSONResponse(dict(request.headers)))])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Paths: an authority, the certificate of the server and that of a client, and another authority."""
    directory = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    names = ("ca", "server", "cert", "key", "both", "other")
    paths = {name: str(directory / f"{name}.pem") for name in names}
    authority.cert_pem.write_to_path(paths["ca"])
    trustme.CA().cert_pem.write_to_path(paths["other"])
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(paths["server"])
    client = authority.issue_cert("kvpin@example.org")
    client.cert_chain_pems[0].write_to_path(paths["cert"])
    client.private_key_pem.write_to_path(paths["key"])
    client.private_key_and_cert_chain_pem.write_to_path(paths["both"])
    return paths


@pytest.fixture(scope="module")
def url(files):
    with served(APP, ssl_certfile=files["server"]) as address:
        yield address.replace("http://", "https://")


@pytest.fixture(scope="module")
def strict_url(files):
    required = {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": files["ca"]}
    with served(APP, ssl_certfile=files["server"], **required) as address:
        yield address.replace("http://", "https://")


async def by_control(spec):
    control = ControlClient(spec)
    try:
        return await control.get("/health")
    finally:
        await control.aclose()


async def by_data_plane(spec):
    transport = HttpTransport(connect_timeout_s=2)
    try:
        async with await transport.send(prepare_request(spec, "GET", "/health", {}, None)) as response:
            await response.read()
            return response.status
    finally:
        await transport.aclose()


@pytest.mark.parametrize("client", [by_control, by_data_plane])
async def test_both_clients_trust_the_engines_own_authority_and_no_other(client, url, files):
    spec = EngineSpec("openai_compatible", url, "e", ca=files["ca"])
    assert await client(spec)
    for distrusted in (replace(spec, ca=files["other"]), replace(spec, ca=None)):
        with pytest.raises(EngineUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await client(distrusted)


async def test_who_distrusts_a_certificate_is_told_what_to_do(url):
    with pytest.raises(EngineUnavailable, match="name the authorities that signed its certificate: ca=FILE"):
        await by_control(EngineSpec("openai_compatible", url, "e"))


@pytest.mark.parametrize("client", [by_control, by_data_plane])
async def test_both_clients_show_the_certificate(client, strict_url, files):
    spec = EngineSpec("openai_compatible", strict_url, "e", ca=files["ca"])
    assert await client(replace(spec, cert=files["cert"], key=files["key"]))
    assert await client(replace(spec, cert=files["both"]))
    with pytest.raises(EngineUnavailable):
        await client(spec)


async def test_certificates_are_checked_however_the_scheme_is_spelt(url):
    with pytest.raises(EngineUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        await by_control(EngineSpec("openai_compatible", url.replace("https", "HTTPS"), "e"))


def test_one_context_an_engine(files):
    spec = EngineSpec("openai_compatible", "https://h:1", "e", ca=files["ca"])
    assert tls_context(spec) is tls_context(replace(spec, id="other"))
    assert tls_context(spec) is not tls_context(replace(spec, ca=files["other"]))
    assert tls_context(replace(spec, url="http://h:1")) is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"ca": "missing"}, "engine 'e': ca: 'missing' cannot be read: No such file or directory"),
        ({"ca": "key"}, "ca: .* holds no certificates in PEM form"),
        ({"cert": "cert"}, "do not go together"),
        ({"cert": "server", "key": "key"}, "do not go together"),
        ({"cert": "cert", "key": "missing"}, "key: 'missing' cannot be read"),
        ({"key": "key"}, "key is given without cert"),
        ({"ca": "a\0b"}, "ca: .* is no path"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(files, names, message):
    paths = {name: files.get(path, path) for name, path in names.items()}
    with pytest.raises(EngineSpecError, match=message):
        ControlClient(EngineSpec("openai_compatible", "https://h:1", "e", **paths))


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_password(files, tmp_path):
    key = pem.load_pem_private_key(Path(files["key"]).read_bytes(), None)
    encrypted = tmp_path / "key.pem"
    encrypted.write_bytes(
        key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.BestAvailableEncryption(b"hush"))
    )
    spec = EngineSpec("openai_compatible", "https://h:1", "e", cert=files["cert"], key=str(encrypted))
    with pytest.raises(EngineSpecError, match="unencrypted private key"):
        tls_context(spec)
