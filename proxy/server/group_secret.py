"""The secret of a group of kvpins: what block hashes, and the salts of tenants, begin with.

xxh3 is no cryptographic hash. Who knows what a chain of hashes begins with can make a prompt whose block has
the hash of somebody else's block, and learns from predictions how that one goes on. Nobody knows a secret
beginning. All kvpins of a group have the same one, because they tell each other hashes:

exchange by a directory   a file there
exchange by Redis         a key there
neither                   a file in `state_dir`, or made anew at each start

Salts have the secret only where it outlives a restart: with other salts, engines would compute all KV anew.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from pathlib import Path

import msgspec
import structlog

from proxy.fleet.state_files import make_directory, read, write
from proxy.settings import ExchangeSettings, SettingsError

log = structlog.get_logger(__name__)

FILE = "secret"
_BYTES = 32
_REDIS_S = 2.0


class GroupSecret(msgspec.Struct, frozen=True):
    """The secret: 32 random bytes, and whether they are the same after a restart."""

    value: bytes
    outlives: bool

    def __repr__(self) -> str:
        return f"GroupSecret(outlives={self.outlives})"

    @property
    def encoded(self) -> bytes:
        """As files and Redis keep it."""
        return msgspec.msgpack.encode(self)

    @property
    def for_roots(self) -> bytes:
        """The key of namespace roots."""
        return self._derived(b"roots")

    @property
    def for_salts(self) -> bytes:
        """The key of tenants' salts; b"" if they have none."""
        return self._derived(b"salts") if self.outlives else b""

    def _derived(self, use: bytes) -> bytes:
        return blake2b(use, key=self.value, digest_size=_BYTES, person=b"kvpin secret").digest()


def group_secret(state_dir: Path | None, exchange: ExchangeSettings | None) -> GroupSecret:
    """The secret of this kvpin's group, which `state_dir` keeps over a restart. Raises SettingsError if a
    directory cannot be used."""
    by_redis = exchange is not None and exchange.directory is None
    made = GroupSecret(secrets.token_bytes(_BYTES), outlives=state_dir is not None or by_redis)
    if state_dir is not None:
        make_directory(state_dir)
    own = _agreed_in(state_dir, made) if state_dir is not None else made
    agreed = own
    if exchange is not None and exchange.directory is not None:
        agreed = _agreed_in(exchange.directory, own)
    elif exchange is not None:
        agreed = _agreed_by_redis(exchange, own)
    if state_dir is not None and agreed != own:
        write(state_dir / FILE, agreed.encoded)
    return agreed


def _agreed_in(directory: Path, own: GroupSecret) -> GroupSecret:
    """The secret that lies in a directory. If there is none, it is `own` from now on."""
    path = directory / FILE
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            write(path, own.encoded, is_first=True)
        except FileExistsError:
            return _decoded(read(path))
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingsError(f"the secret in {str(path)!r} cannot be used: {error}") from error
    return own


def _agreed_by_redis(exchange: ExchangeSettings, own: GroupSecret) -> GroupSecret:
    """The secret of the namespace. If there is none, it is `own` from now on."""
    from redis import Redis  # noqa: PLC0415 - it needs an extra
    from redis.exceptions import RedisError  # noqa: PLC0415

    url, key = exchange.url.get_secret_value(), f"kvpin:{exchange.namespace}:secret"
    try:
        with Redis.from_url(url, socket_timeout=_REDIS_S, socket_connect_timeout=_REDIS_S) as client:
            client.set(key, own.encoded, nx=True)
            return _decoded(client.get(key))
    except (RedisError, OSError, msgspec.MsgspecError) as error:
        log.warning(
            "Redis does not tell the secret of this kvpin's group: its hashes may be others than the group's",
            error=type(error).__name__,
        )
        return own


def _decoded(data: object) -> GroupSecret:
    return msgspec.msgpack.decode(data if isinstance(data, bytes) else b"", type=GroupSecret)
