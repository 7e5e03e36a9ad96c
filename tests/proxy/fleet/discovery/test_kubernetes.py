"""The engines behind Kubernetes services, from an API server on a socket."""

import asyncio
import ssl

import pytest
import trustme

from proxy.fleet import discovery
from proxy.fleet.discovery import ApiServer, KubernetesFinder, SourceError
from proxy.settings import DiscoverySettings
from tests.kv_world import until

BOTH = [("vllm-0", "10.0.0.1", True), ("vllm-1", "10.0.0.2", True)]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(discovery, "WATCH_PAUSE_S", 0.01)


def finder(cluster, source="kubernetes:///vllm"):
    settings = DiscoverySettings(source=source, kind="vllm")
    return KubernetesFinder(settings, settings.place, cluster)


def told(found):
    return [(each.entry.id, each.entry.url, each.is_ready) for each in found]


async def next_of(sets):
    return told(await asyncio.wait_for(anext(sets), 30))


async def test_pods_come_are_not_ready_and_go(cluster):
    api, place = cluster
    api.put("vllm-abc", BOTH[0])
    api.put("other", ("x", "10.0.0.9", True), service="other")
    sets = finder(place).found()
    first = ("vllm-0.llm", "http://10.0.0.1:8000", True)
    assert await next_of(sets) == [first]
    api.put("vllm-def", BOTH[1])
    assert await next_of(sets) == [first, ("vllm-1.llm", "http://10.0.0.2:8000", True)]
    api.put("vllm-def", ("vllm-1", "10.0.0.2", False))
    assert await next_of(sets) == [first, ("vllm-1.llm", "http://10.0.0.2:8000", False)]
    api.put("vllm-ghi", BOTH[1])  # it moves to another slice
    assert (await next_of(sets))[1][2]
    api.delete("vllm-ghi")
    assert not (await next_of(sets))[1][2]
    api.delete("vllm-def")
    assert await next_of(sets) == [first]
    assert (api.lists, api.watches) == (1, 1)


async def test_a_version_that_is_too_old_means_another_list_and_a_bookmark_spares_it(cluster):
    api, place = cluster
    api.put("vllm-abc", BOTH[0])
    sets = finder(place).found()
    await next_of(sets)
    api.bookmark()
    await next_of(sets)
    api.oldest = 2  # what is before the bookmark is forgotten
    waiting = asyncio.create_task(next_of(sets))
    await until(lambda: api.watches, 30)
    api.fail(410, "expired")
    assert len(await waiting) == 1
    assert api.lists == 2
    api.oldest, api.slices = 100, {}
    waiting = asyncio.create_task(next_of(sets))
    await until(lambda: api.watches >= 2, 30)
    api.oldest = 0
    assert await waiting == []


async def test_what_fails_says_so_and_the_next_attempt_bears_the_new_token(cluster):
    api, place = cluster
    api.status = 401
    with pytest.raises(SourceError, match="Kubernetes answers 401 Unauthorized: not now"):
        await next_of(finder(place).found())
    (place.account / "token").write_text("second")
    api.status = 0
    sets = finder(place).found()
    assert await next_of(sets) == []
    assert api.tokens == ["Bearer first", "Bearer second"]
    waiting = asyncio.create_task(next_of(sets))
    await until(lambda: api.watches, 30)
    api.fail(500, "broken")
    with pytest.raises(SourceError, match="Kubernetes ended a watch: broken"):
        await waiting


@pytest.mark.parametrize(
    ("source", "port", "url"),
    [
        ("kubernetes://llm/vllm:http", 8001, "http://10.0.0.1:8001"),
        ("kubernetes://llm/vllm:9000", 8001, "http://10.0.0.1:9000"),
        ("kubernetes://llm/:http?kubernetes.io/service-name=vllm", 8001, "http://10.0.0.1:8001"),
    ],
)
async def test_the_port_is_named_or_numbered(cluster, source, port, url):
    api, place = cluster
    api.put("vllm-abc", BOTH[0], port=port)
    assert (await next_of(finder(place, source).found()))[0][1] == url


async def test_ports_that_cannot_be_told_apart_and_slices_without_endpoints_or_the_port(cluster):
    api, place = cluster
    api.put("vllm-abc", BOTH[0], ports=[{"name": "http", "port": 1}, {"name": "zmq", "port": 2}])
    with pytest.raises(SourceError, match="the service has several ports: name one"):
        await next_of(finder(place).found())
    api.put("vllm-empty", endpoints=None, ports=None)
    assert await next_of(finder(place, "kubernetes:///vllm:grpc").found()) == []


@pytest.mark.parametrize(
    ("host", "url"), [("10.0.0.1", "https://10.0.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
def test_a_pod_knows_its_cluster(monkeypatch, host, url):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert ApiServer.of_pod() == ApiServer(url)


def test_elsewhere_there_is_none(monkeypatch, tmp_path):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SourceError, match="kvpin does not run in a Kubernetes pod"):
        ApiServer.of_pod()
    with pytest.raises(SourceError, match=r"ca\.crt cannot be used: .*No such file"):
        ApiServer("https://x", tmp_path).client(1)
    with pytest.raises(SourceError, match="namespace cannot be read: No such file"):
        ApiServer("https://x", tmp_path).read("namespace")


async def test_the_server_must_have_a_certificate_of_its_authority_and_gets_the_token_of_now(tmp_path):
    seen = []

    async def answer(reader, writer):
        seen.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    cluster = ApiServer(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", tmp_path)
    async with server, cluster.client(30) as client:
        for token in ("one", "two"):
            (tmp_path / "token").write_text(token + "\n")
            assert (await client.get("/")).status_code == 200
            assert f"authorization: bearer {token}\r\n" in seen[-1]
