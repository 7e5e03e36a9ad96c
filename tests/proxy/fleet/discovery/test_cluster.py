import asyncio
import ssl

import pytest
import trustme

from proxy.fleet.discovery import SourceError
from proxy.fleet.discovery.cluster import ApiServer


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
        ApiServer("https://x", tmp_path).namespace()


async def test_the_server_must_have_a_certificate_of_its_authority_and_gets_the_token_of_now(tmp_path):
    seen = []

    async def answer(reader, writer):
        seen.append((await reader.readuntil(b"\r\n\r\n")).decode())
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
    assert [
        f"authorization: bearer {token}" in text.lower()
        for token, text in zip(("one", "two"), seen, strict=True)
    ] == [True] * 2
