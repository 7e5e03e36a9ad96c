"""What a worker is told, and the settings that it makes of it."""

import os
import socket
from pathlib import Path

import msgspec
import pytest

from engine_adapter import EngineSpec
from proxy.server.workers.supervisor import Orders, starting_file, write_engines, write_refusal
from proxy.settings import WORKER_VARIABLE, ManagedSettings, Settings, SettingsError, StartedSettings


@pytest.fixture
def orders(tmp_path):
    with socket.socket() as listener:
        yield Orders(number=2, of=3, listeners=(listener.fileno(),), directory=str(tmp_path), follows=False)


def test_orders_travel_by_the_environment_and_are_taken_once(orders, monkeypatch):
    for name, value in orders.variable().items():
        monkeypatch.setenv(name, value)
    assert Orders.take() == orders
    assert Orders.take() is None
    assert not any(name.startswith("KVPIN_W") for name in os.environ)


WRONG = [
    "",
    "1",
    "{",
    '{"number": 1}',
    "\udcff",
    ('"number":2', '"number":"x"'),
    ('"listeners":[', '"listeners":[99999,'),
    ('"directory":"', '"directory":"/nowhere'),
    ('"directory":"', '"directory":"\\u0000'),
]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_a_variable_that_no_supervisor_set_is_one_sentence(orders, wrong, monkeypatch):
    value = wrong if isinstance(wrong, str) else orders.variable()[WORKER_VARIABLE].replace(*wrong)
    monkeypatch.setenv(WORKER_VARIABLE, value)
    with pytest.raises(SettingsError, match="KVPIN_WORKER is set, but this process is no worker"):
        Orders.take()


@pytest.mark.parametrize("kind", ["llama_server", "embedded"])
def test_engines_that_the_supervisor_started_run_already(orders, tmp_path, kind):
    words = ("-m", "x.gguf", "--slot-save-path", "/kv", "--api-key", "k") if kind == "llama_server" else ()
    given = {"host_cache_bytes": "3GiB"} if kind == "llama_server" else {}
    started = ManagedSettings(kind=kind, id="mine", command=words, headers="a: b", **given)
    spec = started.spec(1234)
    write_engines(tmp_path, [spec])
    settings = orders.settings(lambda: Settings(managed=(started,), reuse=True, state_dir=tmp_path / "state"))
    assert settings.managed == ()
    (engine,) = settings.engines
    assert isinstance(spec, EngineSpec)
    assert isinstance(engine, StartedSettings)
    assert engine.starting_file == starting_file(tmp_path, "http://127.0.0.1:1234")
    assert engine.spec() == spec
    assert engine.spec().url == "http://127.0.0.1:1234"
    assert settings.exchange.url.get_secret_value() == f"unix:{tmp_path}"
    assert settings.state_dir == tmp_path / "state" / "worker-2"


def test_the_exchange_that_the_user_set_stays_and_without_reuse_there_is_none(orders, tmp_path):
    write_engines(tmp_path, [])
    set_by_user = {"url": "redis://host"}
    settings = orders.settings(lambda: Settings(reuse=True, exchange=set_by_user))
    assert settings.exchange.url.get_secret_value() == "redis://host"
    assert orders.settings(Settings).exchange is None


@pytest.mark.parametrize("given", [None, "of the settings"])
def test_workers_record_with_one_key(orders, given):
    orders = msgspec.structs.replace(orders, recording_key="of all workers")
    write_engines(Path(orders.directory), [])
    settings = orders.settings(lambda: Settings(record_traffic_key=given))
    assert settings.record_traffic_key.get_secret_value() == (given or "of all workers")


def test_what_the_supervisor_refuses_no_worker_takes_over_until_it_is_mended(orders, tmp_path):
    write_engines(tmp_path, [])
    write_refusal(tmp_path, "no engine is named any more")
    with pytest.raises(SettingsError, match="no engine is named any more"):
        orders.settings(Settings)
    for _ in range(2):
        write_refusal(tmp_path, None)
        orders.settings(Settings)
