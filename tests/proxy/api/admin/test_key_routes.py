"""Keys that the admin API issues, at a whole kvpin on a socket with an engine behind it."""

import contextlib
import errno
import hashlib
import json
import os
import time
from datetime import datetime

import httpx
import pytest
from structlog.testing import capture_logs

from engine_adapter import HttpTransport
from proxy.control import keys
from proxy.core.books import MAX_KEYS, IssuedKey, KeyBook
from proxy.core.quotas import TenantLimits
from proxy.fleet import state_files
from proxy.fleet.state_files import KeyBookFile
from proxy.request.tenants import Tenants
from proxy.server.app import Proxy, build_app
from proxy.settings import ApiKeySettings, EngineSettings, Settings
from tests.fakes import FakeEngine, serving
from tests.kv_world import until

LATER = "2999-01-31T00:00:00Z"
BODY = {"model": "m", "prompt": "x", "max_tokens": 1}


class Kvpin:
    """A client of one kvpin."""

    def __init__(self, proxy, client):
        self.proxy, self.client = proxy, client

    async def admin(self, method, path="", **body):
        headers = {"authorization": "Bearer the-admin-key"}
        return await self.client.request(method, f"/admin/v1/keys{path}", json=body or None, headers=headers)

    async def issue(self, **body):
        answer = await self.admin("POST", **body)
        assert answer.status_code == 201, answer.text
        return answer.json()

    async def status(self, key=None, model="m"):
        headers = {"authorization": f"Bearer {key}"} if key is not None else {}
        answer = await self.client.post("/v1/completions", json={**BODY, "model": model}, headers=headers)
        return answer.status_code


@contextlib.asynccontextmanager
async def kvpin(state_dir=None, **settings):
    async with FakeEngine() as engine:
        named = EngineSettings(kind="openai_compatible", url=engine.url, id="e", model="m")
        given = Settings(engines=[named], state_dir=state_dir, admin_key="the-admin-key", **settings)
        proxy = Proxy(given, HttpTransport())
        try:
            async with serving(build_app(proxy)) as url, httpx.AsyncClient(base_url=url) as client:
                proxy.start()
                await until(proxy.fleet.is_ready)
                yield Kvpin(proxy, client)
        finally:
            await proxy.stop()


async def test_the_first_key_closes_kvpin_and_the_last_one_does_not_open_it(tmp_path):
    async with kvpin(tmp_path) as here:
        ended = await here.admin("POST", expires="1999-01-31T00:00:00Z")
        assert (ended.status_code, ended.json()["error"]["param"]) == (400, "expires")
        assert await here.status() == 200
        added = await here.issue(name="for the batch job")
        assert (await here.status(), await here.status("wrong"), await here.status(added["key"])) == (
            401, 401, 200,
        )  # fmt: skip
        removed = await here.admin("DELETE", f"/{added['id']}")
        assert (removed.status_code, removed.json()) == (200, {"id": added["id"], "warning": None})
        assert (await here.status(), await here.status(added["key"])) == (401, 401)
    async with kvpin(tmp_path) as again:
        assert (await again.status(), await again.status(added["key"])) == (401, 401)
        assert (await again.admin("GET")).json() == {"keys": [], "needed": True, "in_settings": 0}


async def test_the_answer_tells_what_a_key_changed_for_others_and_all_that_depends_on_tenants_follows(
    tmp_path,
):
    async with kvpin(tmp_path) as here:
        assert (await here.client.get("/metrics")).status_code == 200
        assert (await here.admin("GET")).json() == {"keys": [], "needed": False, "in_settings": 0}
        first = await here.issue(tenant="one", models=["m", "typo"])
        assert first["notes"] == [
            "this is the first key: from now on, every request needs one",
            "no engine serves 'typo' now",
        ]
        assert (await here.client.get("/metrics")).status_code == 401
        assert (await here.issue(tenant="one"))["notes"] == []
        assert await here.status(first["key"]) == 200
        other = await here.issue(tenant="other")
        (note,) = other["notes"]
        assert note.startswith("not used any more, because several tenants would share their KV: e; ")
        assert note.endswith(f"kvpin keys remove {other['id']}")
        assert await here.status(first["key"]) == 503  # the engine cannot keep tenants apart
        await here.admin("DELETE", f"/{other['id']}")
        assert await here.status(first["key"]) == 200


async def test_a_key_is_told_once_and_nothing_else_ever_has_it(tmp_path):
    async with kvpin(tmp_path) as here:
        with capture_logs() as entries:
            answer = await here.admin("POST", name="n", models=["m"], expires=LATER)
            added = answer.json()
            secret, _notes = added.pop("key"), added.pop("notes")
            listed = await here.admin("GET")
            again = await here.admin("DELETE", f"/{secret}")
        assert answer.headers["cache-control"] == "no-store"
        assert (secret[:4], len(secret)) == ("kvp-", 47)
        assert listed.json()["keys"] == [added]
        assert abs(time.time() - datetime.fromisoformat(added.pop("created")).timestamp()) < 60
        assert added == {
            "id": added["id"], "name": "n", "tenant": "default", "ending": secret[-4:], "models": ["m"],
            "expires": LATER, "expired": False, "limits": None,
        }  # fmt: skip
        assert secret not in listed.text
        assert again.status_code == 404
        assert secret not in json.dumps(entries, default=str)
        paths = [each["path"] for each in entries if each.get("method") == "DELETE"]
        assert paths == ["/admin/v1/keys/(a key)"]
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes()
    assert hashlib.sha256(secret.encode()).digest() in (tmp_path / "keys").read_bytes()


async def test_it_outlives_a_restart_with_its_models_and_its_end(tmp_path):
    async with kvpin(tmp_path) as here:
        for_m, for_other = await here.issue(models=["m"]), await here.issue(models=["other"])
        ends = await here.issue(expires=LATER)
        listed = (await here.admin("GET")).json()
    async with kvpin(tmp_path) as here:
        assert (await here.admin("GET")).json() == listed
        assert await here.status(for_m["key"]) == 200
        assert await here.status(for_other["key"]) == 404
        assert await here.status(ends["key"]) == 200
        key = next(each for each in here.proxy.tenants.issued.issued() if each.id == ends["id"])
        here.proxy.tenants.issued._entries[key.id] = IssuedKey(
            key.id, key.tenant, key.digest, key.ending, key.created, expires=time.time() - 1
        )
        here.proxy.tenants.replace((), {})
        assert await here.status(ends["key"]) == 401
        assert [each["expired"] for each in (await here.admin("GET")).json()["keys"]] == [False, False, True]


async def test_keys_of_the_settings_and_issued_ones_count_alike(tmp_path):
    named = [{"key": "file-key", "tenant": "acme", "requests_per_minute": 3}]
    async with kvpin(tmp_path, api_keys=named) as here:
        added = await here.issue(tenant="acme")
        used = ["file-key", added["key"]] * 2
        assert [await here.status(key) for key in used] == [200, 200, 200, 429]  # one tenant, one quota
        unknown = await here.admin("POST", tenant="other")
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "tenant")
        assert "there is no tenant 'other'; known: acme; new_tenant makes a new one" in unknown.text
        assert "tenant is missing; known: acme" in (await here.admin("POST", name="x")).text
        here.proxy.reload(here.proxy.settings.model_copy(update={"api_keys": ()}))  # all keys of the file go
        assert [await here.status(key) for key in (None, "file-key", added["key"])] == [401, 401, 200]


async def test_a_new_tenant_with_limits_of_its_own(tmp_path):
    named = [ApiKeySettings(key="file-key", tenant="acme")]
    limits = {"requests_per_minute": None, "tokens_per_minute": None, "concurrent_requests": None}
    async with kvpin(tmp_path, api_keys=named) as here:
        first = await here.issue(tenant="new", new_tenant=True, requests_per_minute=3)
        assert first["limits"] == {**limits, "requests_per_minute": 3}
        second = await here.issue(tenant="new")
        quota = here.proxy.tenants.quota("new")
        assert [quota.enter(0.0) is None for _ in range(4)] == [True, True, True, False]
        refused = await here.admin("POST", tenant="acme", tokens_per_minute=5)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tenant")
        assert (await here.admin("POST", tenant="new", concurrent_requests=0)).status_code == 400
        await here.issue(tenant="new", concurrent_requests=7)  # the newest count, and outlive their key
        await here.admin("DELETE", f"/{first['id']}")
        assert (await here.admin("GET")).json()["keys"][0]["limits"] is None
    book = KeyBook()
    book.merge(KeyBookFile(tmp_path).read())
    again = Tenants((), issued=book)
    assert again.quota("new").left(0.0) == []  # no limit for a minute any more
    assert book.limits() == {"new": TenantLimits(concurrent_requests=7)}
    assert again.find(second["key"]).tenant == "new"


async def test_where_a_key_is_in_both_the_settings_count(tmp_path):
    async with kvpin(tmp_path) as here:
        added = await here.issue(models=["other"])
        key = ApiKeySettings(key=added["key"], tenant="acme", models=["m"])
        here.proxy.reload(here.proxy.settings.model_copy(update={"api_keys": (key,)}))
        assert here.proxy.tenants.find(added["key"]).tenant == "acme"
        await here.admin("DELETE", f"/{added['id']}")
        assert here.proxy.tenants.find(added["key"]).tenant == "acme"


async def test_without_a_state_dir_none_is_issued():
    async with kvpin() as here:
        answer = await here.admin("POST", name="x")
        assert answer.status_code == 409
        assert "set state_dir" in answer.json()["error"]["message"]
        assert (await here.admin("GET")).json() == {"keys": [], "needed": False, "in_settings": 0}
        assert await here.status() == 200


async def test_there_is_a_limit(tmp_path):
    async with kvpin(tmp_path) as here:
        many = (IssuedKey(f"k{n}", "t", b"%d" % n, "last", 0.0) for n in range(MAX_KEYS))
        here.proxy.tenants.issued.merge(many)
        answer = await here.admin("POST", name="x")
        assert (answer.status_code, "2000 issued keys" in answer.text) == (409, True)


async def test_a_leaked_key_is_closed_in_the_whole_group_while_the_disk_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "_LOOK_S", 0.1)
    group = {"reuse": True, "exchange": {"url": f"unix:{tmp_path / 'group'}"}}
    async with kvpin(tmp_path / "one", **group) as one, kvpin(tmp_path / "two", **group) as two:
        leaked, kept = await one.issue(), await one.issue()
        await until(lambda: two.proxy.tenants.find(leaked["key"]))

        def full(*_args, **_fields):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as disk:
            disk.setattr(state_files, "write", full)
            removed = await one.admin("DELETE", f"/{leaked['id']}")
            assert (removed.status_code, await one.status(leaked["key"])) == (200, 401)
            assert "its removal is not saved: " in removed.json()["warning"]
            assert "No space left on device" in removed.json()["warning"]
            await until(lambda: not two.proxy.tenants.find(leaked["key"]))
            assert [await each.status(kept["key"]) for each in (one, two)] == [200, 200]
            assert (await one.admin("POST", name="x")).status_code == 500
        for name in ("one", "two"):
            file = KeyBookFile(tmp_path / name)
            await until(lambda file=file: [key.id for key in file.read() if key.removed] == [leaked["id"]])


async def test_kvpins_that_share_the_directory_follow_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "_LOOK_S", 0.1)
    async with kvpin(tmp_path) as one, kvpin(tmp_path) as other:
        added = await one.issue()
        await until(lambda: other.proxy.tenants.find(added["key"]))
        assert [await other.status(key) for key in (None, added["key"])] == [401, 200]
        mine = await other.issue()
        await one.admin("DELETE", f"/{added['id']}")
        await until(
            lambda: one.proxy.tenants.find(mine["key"]) and not other.proxy.tenants.find(added["key"])
        )
        assert [await other.status(added["key"]), await one.status(mine["key"])] == [401, 200]


async def test_a_book_that_is_damaged_while_kvpin_runs_changes_nothing_and_is_told_once(tmp_path):
    async with kvpin(tmp_path) as here:
        added = await here.issue()
        whole = (tmp_path / "keys").read_bytes()
        with capture_logs() as entries:
            (tmp_path / "keys").write_bytes(b"nonsense")
            os.utime(tmp_path / "keys", (0, 0))
            for _ in range(3):
                await here.proxy.keys.look()
            assert await here.status(added["key"]) == 200
            assert (await here.admin("POST", name="x")).status_code == 500
        told = [each["event"] for each in entries if each["log_level"] == "error"]
        assert told == ["issued keys are not saved: those that are known count; repair the file"]
        (tmp_path / "keys").write_bytes(whole)
        await here.issue()


@pytest.mark.parametrize("expires", ["9999-12-31T23:59:59-12:00", "9999-12-31T23:59:59.999999Z"])
async def test_a_key_that_ends_where_the_calendar_does_can_be_listed_and_removed(tmp_path, expires):
    async with kvpin(tmp_path) as here:
        added = await here.issue(expires=expires)
        assert await here.status(added["key"]) == 200
        (listed,) = (await here.admin("GET")).json()["keys"]
        assert listed["expires"].startswith("9999-12-")
        assert (await here.admin("DELETE", f"/{listed['id']}")).status_code == 200
        assert await here.status(added["key"]) == 401
