"""HTTPS on kvpin's own port, as a process: its certificate, its clients' certificates, their renewal."""

import asyncio
import contextlib
import signal
import ssl
import sys

import httpx
import pytest
import trustme

from proxy.http.listeners import listen
from proxy.http.tls import server_context
from proxy.settings import SettingsError, TlsSettings
from tests.fakes import FakeEngine


@pytest.fixture
def authority():
    return trustme.CA()


@pytest.fixture
def files(tmp_path, authority):
    """A certificate of this machine, its key, and the authority that also signed the client's."""
    paths = {name: tmp_path / f"{name}.pem" for name in ("cert", "key", "ca", "client")}
    write(authority, paths)
    authority.cert_pem.write_to_path(paths["ca"])
    authority.issue_cert("client@example.org").private_key_and_cert_chain_pem.write_to_path(paths["client"])
    return paths


def write(authority, paths):
    issued = authority.issue_cert("127.0.0.1", "localhost")
    paths["key"].write_bytes(issued.private_key_pem.bytes())
    paths["cert"].write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))


async def test_https_with_client_certificates_that_are_renewed_without_a_restart(files, authority, tmp_path):
    trusts = ssl.create_default_context(cafile=str(files["ca"]))
    shows = ssl.create_default_context(cafile=str(files["ca"]))
    shows.load_cert_chain(files["client"])
    config, log = tmp_path / "kvpin.toml", tmp_path / "log"
    async with FakeEngine("a") as engine:
        with listen("127.0.0.1", 0) as free:
            port = free.getsockname()[1]
        config.write_text(
            f'port = {port}\n[tls]\ncert = "{files["cert"]}"\nkey = "{files["key"]}"\n'
            f'client_ca = "{files["ca"]}"\n[[engines]]\nkind = "openai_compatible"\nurl = "{engine.url}"\n'
        )
        command = [
            sys.executable,
            "-m",
            "proxy.cli",
            "serve",
            "--config",
            str(config),
            "--log-format",
            "json",
        ]
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
        try:
            await logged(log, "engine is ready")
            async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=shows) as client:
                ask = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
                answer = await client.post("/v1/chat/completions", json=ask)
                assert answer.content.endswith(b"data: [DONE]\n\n")
                assert f"https://127.0.0.1:{port}/v1" in (await client.get("/")).text
            async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=trusts) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get("/health/live")
            before = await asyncio.to_thread(serial, port, shows)
            write(authority, files)
            process.send_signal(signal.SIGHUP)
            await logged(log, "settings reloaded")
            assert await asyncio.to_thread(serial, port, shows) != before
            files["key"].write_bytes(b"none")
            process.send_signal(signal.SIGHUP)
            await logged(log, "settings not reloaded: the old ones stay")
            assert await asyncio.to_thread(serial, port, shows) is not None
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def logged(log, text):
    async with asyncio.timeout(120):
        while text not in log.read_text():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.05)


def serial(port, context):
    """The serial number of the certificate that a new connection gets."""
    import socket

    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        return connection.getpeercert()["serialNumber"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cert": "/nowhere"}, r"tls.cert: '/nowhere' cannot be read: No such file"),
        ({"key": "ca"}, r"do not go together as a PEM certificate and its unencrypted private key"),
        ({"client_ca": "key"}, r"tls.client_ca: '.*key.pem' holds no certificates in PEM form"),
    ],
)
def test_files_that_cannot_be_used_are_named(files, change, said):
    values = {
        name: files.get(value, value) for name, value in {"cert": "cert", "key": "key", **change}.items()
    }
    with pytest.raises(SettingsError, match=said):
        server_context(TlsSettings(**values))
