"""TLS of kvpin's own port: its certificate, and the clients it lets in."""

from __future__ import annotations

import ssl
from pathlib import Path

from proxy.settings import SettingsError, TlsSettings


def server_context(tls: TlsSettings) -> ssl.SSLContext:
    """The context of the port. Reading the files again and replacing it lets certificates be renewed.

    Raises:
        SettingsError: a file cannot be read, or does not hold what it should.
    """
    for name, path in (("cert", tls.cert), ("key", tls.key), ("client_ca", tls.client_ca)):
        if path is not None:
            _check_file(name, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, tls)
    if tls.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(tls.client_ca)
        except ssl.SSLError as error:
            raise SettingsError(
                f"tls.client_ca: {str(tls.client_ca)!r} holds no certificates in PEM form"
            ) from error
    return context


def load_certificate(context: ssl.SSLContext, tls: TlsSettings) -> None:
    """Reads the certificate, which new connections then get.

    Raises:
        SettingsError: certificate and key do not go together.
    """
    try:
        context.load_cert_chain(tls.cert, tls.key, password=_no_password)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"tls.cert {str(tls.cert)!r} and tls.key {str(tls.key or tls.cert)!r} do not go together as a "
            "PEM certificate and its unencrypted private key"
        ) from error


def _check_file(name: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise SettingsError(f"tls.{name}: {str(path)!r} cannot be read: {error.strerror}") from error


def _no_password() -> str:
    """Fails where OpenSSL would ask for a password on the terminal."""
    raise ValueError("the private key is encrypted")
