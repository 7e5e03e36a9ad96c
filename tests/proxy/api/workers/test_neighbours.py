"""Two kvpins of one machine, each without workers: what an operator asks one that the other must do, too."""

from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic
from types import SimpleNamespace

import httpx
import pytest

from engine_adapter import HttpTransport
from proxy.core.retention import AdminPin
from proxy.server.app import Proxy, build_app
from proxy.settings import ExchangeSettings, Settings
from tests.fakes import serving
from tests.kv_world import safetensors_of, until
from tests.proxy.api.admin.test_table_routes import RAW
from tests.proxy.peers.reachable import reachable


@pytest.fixture
async def two(tmp_path):
    """Two kvpins, and a client of the first."""
    exchange = ExchangeSettings.model_validate({"url": f"unix:{tmp_path / 'bus'}"})
    async with AsyncExitStack() as stack:
        proxies = []
        for _ in range(2):
            settings = Settings(engines_file=Path("/none.toml"), reuse=True, exchange=exchange)
            proxy = Proxy(settings, HttpTransport())
            stack.push_async_callback(proxy.stop)
            site = build_app(proxy)
            proxy.start()
            await until((tmp_path / "bus").exists)
            await stack.enter_async_context(reachable(SimpleNamespace(peers=proxy.peers, site=site)))
            proxies.append((proxy, site))
        (one, site), (other, _) = proxies
        await until(lambda: one.peers.sockets() and other.peers.sockets())
        url = await stack.enter_async_context(serving(site))
        client = httpx.AsyncClient(base_url=f"{url}/admin/v1", trust_env=False)
        yield one, other, await stack.enter_async_context(client)


async def test_a_pin_of_the_other_is_shown_and_ended(two):
    _, other, client = two
    other.fleet.pins.add(AdminPin("p", {}, 3, monotonic() + 60, "prefix"))
    for _ in range(200):
        if pins := (await client.get("/stats")).json()["pins"]:
            break
    assert [(pin["pin_id"], pin["kvpin"]) for pin in pins] == [("p", other.fleet.name)]
    ended = await client.post("/unpin", json={"pin_id": "p"})
    assert (ended.status_code, ended.json()["result"]) == (200, {"pin_id": "p", "unpinned": True})
    assert (await client.get(f"/operations/{ended.json()['id']}")).status_code == 200
    assert not other.fleet.pins.active(monotonic())
    assert (await client.post("/unpin", json={"pin_id": "p"})).status_code == 404


async def test_prompt_tables_come_and_go_at_both(two):
    one, other, client = two
    put = await client.post("/prompt_tables?id=t", content=safetensors_of(), headers=RAW)
    assert put.status_code < 300, put.text
    assert [[table.table_id for table in proxy.tables.list()] for proxy in (one, other)] == [["t"]] * 2
    assert (await client.delete("/prompt_tables/t")).status_code < 300
    assert [proxy.tables.list() for proxy in (one, other)] == [[], []]
