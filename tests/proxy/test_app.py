import pytest

from engine_adapter import EngineSpecError
from proxy.app import check_engines, listen, managed_engines
from proxy.settings import EngineSettings, ManagedSettings, Settings

ELSEWHERE = EngineSettings(kind="vllm", url="http://127.0.0.1:1", id="v")


def test_two_embedded_engines_when_none_is_named():
    engines = managed_engines(Settings())
    assert [(engine.kind, engine.id) for engine in engines] == [
        ("embedded", "embedded-0"),
        ("embedded", "embedded-1"),
    ]


def test_no_engine_is_added_to_those_that_are_named():
    assert managed_engines(Settings(engines=(ELSEWHERE,))) == ()
    mine = ManagedSettings(kind="embedded", id="mine")
    assert managed_engines(Settings(managed=(mine,))) == (mine,)


def test_a_kind_that_does_not_exist_is_named_with_those_that_do():
    with pytest.raises(EngineSpecError, match="unknown kind 'foo': use one of embedded, "):
        check_engines(Settings(engines=(EngineSettings(kind="foo", url="http://127.0.0.1:1", id="f"),)))


def test_without_torch_only_embedded_engines_are_refused(monkeypatch):
    monkeypatch.setattr("proxy.app.find_spec", lambda name: None)
    check_engines(Settings(engines=(ELSEWHERE,)))
    with pytest.raises(EngineSpecError, match=r"pip install 'kvpin\[engine\]'"):
        check_engines(Settings())


def test_a_port_is_taken_once():
    with listen("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use"):
        listen(*first.getsockname())
