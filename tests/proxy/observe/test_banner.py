import json

import pytest

from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.observe.banner import Banner
from tests.fakes import FakeAdapter


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("fd00::7", "http://[fd00::7]:8000"),
    ],
)
def test_it_names_addresses_that_can_be_connected_to(capsys, host, shown):
    Banner(Fleet(), host, 8000, reuse=True).print_addresses()
    printed = capsys.readouterr().out
    assert f"base_url  {shown}/v1\n" in printed
    assert f"admin     {shown}/admin/v1\n" in printed
    assert "reuse on" in printed


def test_it_says_how_reuse_is_turned_on(capsys):
    Banner(Fleet(), "127.0.0.1", 8000, reuse=False).print_addresses()
    assert "reuse off (ENABLE_KV_CACHE_REUSE=1 turns it on)" in capsys.readouterr().out


async def test_once_engines_are_ready_there_is_a_request_to_copy(capsys):
    fleet, adapter = Fleet(), FakeAdapter("a")
    engine = fleet.add(adapter)
    fleet.join(engine, adapter.info)
    engine.state = EngineState.READY
    await Banner(fleet, "127.0.0.1", 8000, reuse=True).print_when_ready()
    printed = capsys.readouterr().out
    assert "ready: m on a\n" in printed
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in printed
    body = json.loads(printed.partition("-d '")[2].partition("'")[0])
    assert body["model"] == "m"
