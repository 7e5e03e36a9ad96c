"""The secret of block hashes and salts: who has the same one, and what knowing everything else is worth."""

import re
import stat
from pathlib import Path

import msgspec
import pytest
from redis import Redis

from engine_adapter import HttpTransport
from proxy.core.index.blocks import namespace_root
from proxy.request.tenants import ApiKey, Tenants
from proxy.server.app import Proxy
from proxy.server.group_secret import FILE, GroupSecret, group_secret
from proxy.settings import ExchangeSettings, Settings, SettingsError
from tests.fakes import INFO, FakeAdapter
from tests.valkey import Valkey

MANY = Path("docs/many.md").read_text(encoding="utf-8")
ACL = re.search(r"^ACL SETUSER (kvpin .*)$", MANY, re.MULTILINE)[1]


def directory(path):
    return ExchangeSettings(url=f"unix:{path}")


def test_without_a_place_that_lasts_salts_have_none_and_only_workers_share_it(tmp_path):
    one, two = group_secret(None, None), group_secret(None, None)
    assert one.value != two.value
    assert one.for_roots != two.for_roots
    workers = [group_secret(None, directory(tmp_path)) for _ in range(2)]
    assert workers[0] == workers[1]
    assert {each.for_salts for each in (one, two, *workers)} == {b""}


def test_a_state_dir_keeps_it(tmp_path):
    one = group_secret(tmp_path / "state", None)
    assert group_secret(tmp_path / "state", None) == one
    assert one.for_salts not in (b"", one.for_roots)
    file = tmp_path / "state" / FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert one.value.hex() not in repr(one)


def test_kvpins_of_a_directory_have_the_same_one(tmp_path):
    first = group_secret(tmp_path / "a", directory(tmp_path / "exchange"))
    alone = group_secret(tmp_path / "b", None)
    second = group_secret(tmp_path / "b", directory(tmp_path / "exchange"))
    assert first == second == group_secret(None, directory(tmp_path / "exchange")) != alone
    # It is what a kvpin of the group has when it starts alone, and what it gives to a new group.
    assert group_secret(tmp_path / "b", directory(tmp_path / "other")) == first


def test_kvpins_of_a_redis_have_the_same_one(tmp_path):
    server = Valkey()
    try:
        first = group_secret(tmp_path / "a", ExchangeSettings(url=server.url, namespace="n"))
        assert group_secret(None, ExchangeSettings(url=server.url, namespace="n")) == first
        assert group_secret(None, ExchangeSettings(url=server.url, namespace="other")) != first
        with Redis.from_url(server.url) as redis:
            redis.execute_command("ACL SETUSER", *ACL.split())
            own = server.url.replace("://", "://kvpin:PASSWORD@")
            ours = [group_secret(None, ExchangeSettings(url=own, namespace="default")) for _ in range(2)]
            assert ours[0] == ours[1]  # the documented user may read and write it
            assert msgspec.msgpack.decode(redis.get("kvpin:n:secret"), type=GroupSecret) == first
    finally:
        server.kill()
    # While Redis is away, a kvpin that knows the group's goes on with it.
    assert group_secret(tmp_path / "a", ExchangeSettings(url=server.url, namespace="n")) == first
    assert group_secret(None, ExchangeSettings(url=server.url, namespace="n")) != first


@pytest.mark.parametrize("content", [b"", b"x", msgspec.msgpack.encode(["short"])])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(SettingsError, match=f"the secret in '{tmp_path / FILE}' cannot be used"):
        group_secret(tmp_path, None)


def test_hashes_and_salts_cannot_be_computed_without_it(tmp_path):
    """A prompt was made whose first block had the hash of another tenant's, from the names of both."""
    keys = [{"key": f"key-of-{name}", "tenant": name} for name in ("ada", "bob")]
    found = [
        Proxy(Settings(api_keys=keys, state_dir=tmp_path / name), HttpTransport()) for name in ("a", "a", "b")
    ]
    assert len({proxy.fleet.secret_name for proxy in found}) == 2
    salts = {proxy.tenants.salt("ada", None) for proxy in found}
    assert len(salts) == 2
    roots = [proxy.fleet.join(proxy.fleet.add(FakeAdapter("e")), INFO).root_of("s") for proxy in found]
    assert roots[0] == roots[1] != roots[2]
    without = Tenants([ApiKey.of("k1", "ada"), ApiKey.of("k2", "bob")]).salt("ada", None)
    assert without not in salts
    assert namespace_root("m", salt="s") not in roots
