"""Objects that an engine keeps, through `kvpin serve` with several workers and tenants."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.fakes import FakeEngine, answer
from tests.live.conftest import running_kvpin
from tests.proxy.request.objects_world import KEYS, Objects

pytestmark = pytest.mark.live

N = 12  # connections: each may lead to another worker


class Engine(Objects):
    """An engine that is checked before it gets requests."""

    async def __call__(self, exchange):
        if exchange.target in ("/health", "/v1/models"):
            await answer(exchange)
        else:
            await super().__call__(exchange)


def settings(engine):
    keys = (f'[[api_keys]]\nkey = "key-{name}"\ntenant = "{name}"\n' for name in KEYS)
    return f'[[engines]]\nkind = "openai_compatible"\nurl = "{engine.url}"\nshare_kv = true\n' + "".join(keys)


async def ask(kvpin, method, path, tenant, **options):
    """The answer to a request on a connection of its own."""
    async with httpx.AsyncClient(timeout=60, trust_env=False, verify=False) as client:  # noqa: S501
        return await client.request(method, f"{kvpin.url}{path}", headers=KEYS[tenant], **options)


async def test_any_worker_reaches_a_tenants_responses(tmp_path):
    config = tmp_path / "kvpin.toml"
    async with FakeEngine("a", Engine()) as engine:
        config.write_text(settings(engine))
        flags = ("--config", str(config), "--workers", "2")
        running = running_kvpin(tmp_path / "log", *flags, tokenised=False)
        kvpin = await asyncio.to_thread(running.__enter__)
        try:
            made = []
            for _ in range(N):
                body = {"model": "m", "input": "hi"}
                created = await ask(kvpin, "POST", "/v1/responses", "a", json=body)
                made.append(f"/v1/responses/{created.raise_for_status().json()['id']}")
                for path in ("/v1/responses", "/v1/files", f"/v1/files/{created.json()['id']}"):
                    assert (await ask(kvpin, "GET", path, "b")).status_code == 403
            for path in made:
                for _ in range(3):
                    assert (await ask(kvpin, "GET", path, "a")).status_code == 200
                    assert (await ask(kvpin, "GET", path, "b")).status_code == 404
                    assert (await ask(kvpin, "DELETE", path, "b")).status_code == 404
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)
