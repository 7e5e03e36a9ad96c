"""The TLS of one engine: one context, for its control calls and for the data plane."""

from __future__ import annotations

import ssl
from functools import lru_cache
from pathlib import Path

from engine_adapter.errors import EngineSpecError
from engine_adapter.types import EngineSpec


def tls_context(spec: EngineSpec) -> ssl.SSLContext | None:
    """The context of an https engine, None for any other.

    With `ca`, only those authorities are trusted; without, the machine's own.

    Raises:
        EngineSpecError: a file cannot be read, or does not hold what it should.
    """
    if spec.url.lower().startswith("https://"):
        try:
            return _context(spec.ca, spec.cert, spec.key)
        except EngineSpecError as error:
            raise EngineSpecError(f"engine {spec.id!r}: {error}") from error
    return None


@lru_cache
def _context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """Shared by engines with the same files: a context takes about 20 ms to make."""
    if key is not None and cert is None:
        raise EngineSpecError("key is given without cert: name the certificate it belongs to")
    for name, path in (("ca", ca), ("cert", cert), ("key", key)):
        if path is not None:
            _check_file(name, path)
    try:
        context = ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        raise EngineSpecError(f"ca: {ca!r} holds no certificates in PEM form") from error
    if cert is not None:
        try:
            context.load_cert_chain(cert, key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise EngineSpecError(
                f"cert {cert!r} and key {key or cert!r} do not go together as a PEM certificate and its "
                "unencrypted private key"
            ) from error
    return context


def _check_file(name: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise EngineSpecError(f"{name}: {path!r} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a null byte
        raise EngineSpecError(f"{name}: {path!r} is no path: {error}") from error


def _no_password() -> str:
    """Replaces OpenSSL's question for a password on the terminal."""
    raise ValueError("the private key is encrypted")
