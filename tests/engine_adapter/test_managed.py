import sys

import pytest

from engine_adapter import (
    EngineSpecError,
    check_command,
    engine_command,
    health_path,
    managed_advice,
    managed_command,
    managed_spec,
    prepare_managed,
)
from engine_adapter.llama_server.command import default_save_bytes, default_save_dir
from tests.engines import engine_spec


def spec(kind, **fields):
    return engine_spec(kind, "http://127.0.0.1:4711", **fields)


def command(kind, *words, **fields):
    return managed_command(kind, words, port=4711, spec=managed_spec(spec(kind, **fields), words))


def test_each_kind_has_its_command_line():
    assert command("embedded", "--kv-blocks", "64") == [
        *(sys.executable, "-m", "engine_adapter.torch_engine", "--exit-with-parent"),
        *("--port", "4711", "--kv-blocks", "64"),
    ]
    assert command("vllm", "vllm", "serve", "--port={port}") == ["vllm", "serve", "--port=4711"]
    llama = command("llama_server", "-m", "x", host_cache_dir="/kv", host_cache_bytes=1)
    assert llama[:7] == ["llama-server", "-m", "x", "--host", "127.0.0.1", "--port", "4711"]
    assert llama[llama.index("--slot-save-path") + 1] == "/kv/"


def test_the_binary_of_a_llama_server_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("LLAMA_SERVER", "/opt/llama-server")
    assert command("llama_server", "-m", "x")[0] == "/opt/llama-server"
    assert command("llama_server", "mine", "-m", "x")[0] == "mine"


def test_a_llama_server_gets_a_host_cache():
    words = ("-m", "x")
    by_default = managed_spec(spec("llama_server"), words)
    assert by_default.options.host_cache_dir == str(default_save_dir())
    assert by_default.options.host_cache_bytes == default_save_bytes(default_save_dir())
    given = spec("llama_server", host_cache_dir="/kv", host_cache_bytes=7, api_key="k")
    assert managed_spec(given, words) == given
    words = ("-m", "x", "--slot-save-path", "/mine/", "--api-key", "hush")
    named = managed_spec(spec("llama_server", host_cache_bytes=7), words)
    assert (named.options.host_cache_dir, named.options.host_cache_bytes, named.api_key) == (
        "/mine",
        7,
        "hush",
    )
    assert managed_spec(spec("llama_server", host_cache_dir="/mine"), words).options.host_cache_dir == "/mine"


def test_directories_are_whole_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    given = spec("llama_server", host_cache_dir="~/kv", host_cache_bytes=7, disk_cache_dir="cold")
    completed = managed_spec(given, ("-m", "x"))
    assert (completed.options.host_cache_dir, completed.options.disk_cache_dir) == (
        "/home/me/kv",
        str(tmp_path / "cold"),
    )
    named = managed_spec(spec("llama_server"), ("-m", "x", "--slot-save-path", "hot"))
    assert named.options.host_cache_dir == str(tmp_path / "hot")


def test_two_directories_for_one_thing_are_refused():
    words = ("-m", "x", "--slot-save-path", "/a")
    with pytest.raises(EngineSpecError, match=r"'/a' and host_cache_dir '/b' differ: give one of them"):
        managed_spec(spec("llama_server", host_cache_dir="/b"), words)


@pytest.mark.parametrize("kind", ["embedded", "vllm"])
def test_other_kinds_are_as_the_operator_said(kind):
    assert managed_spec(spec(kind), ("x", "--api-key", "k")) == spec(kind)
    assert managed_advice(kind, ("-kvu",)) == ()


def test_advice_is_the_kinds():
    assert len(managed_advice("llama_server", ("-m", "x", "-kvu"))) == 1


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("embedded", ("--port", "1"), "--port is chosen by kvpin"),
        ("embedded", ("--host=0.0.0.0",), "--host is chosen by kvpin"),
        ("llama_server", ("-m", "x", "--port", "1"), "--port is chosen by kvpin"),
        ("llama_server", (), "names no model"),
        ("embedded", ("--modle", "x"), "No such option: --modle"),
        ("embedded", ("--threads", "0"), "--threads"),
        ("embedded", ("--kv-blocks", "0"), "kv_blocks is 0; at least 1 is needed"),
        ("embedded", ("--help",), "--help starts no engine"),
        ("vllm", (), r"must say \{port\}"),
        ("sglang", ("x", "--port", "1"), r"must say \{port\}"),
    ],
)
def test_words_that_can_never_work(kind, words, message):
    with pytest.raises(EngineSpecError, match=message):
        check_command(kind, words)


def test_words_that_can_work():
    check_command("embedded", ())
    check_command("nim", ("x", "{port}"))


def test_an_engine_whose_program_is_missing_is_told(monkeypatch):
    prepare_managed(spec("vllm"), (sys.executable, "{port}"))
    with pytest.raises(EngineSpecError, match="no program '/nowhere/vllm'"):
        prepare_managed(spec("vllm"), ("/nowhere/vllm", "{port}"))
    monkeypatch.setattr(engine_command, "find_spec", lambda _name: None)
    with pytest.raises(EngineSpecError, match=r"pip install 'kvpin\[engine\]'"):
        prepare_managed(spec("embedded"), ())


def test_what_a_llama_server_needs_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_SERVER", "true")
    (tmp_path / "m.gguf").touch()
    dirs = {"host_cache_dir": str(tmp_path / "a" / "host"), "disk_cache_dir": str(tmp_path / "disk")}
    words = ("-m", str(tmp_path / "m.gguf"))
    prepare_managed(managed_spec(spec("llama_server", **dirs), words), words)
    assert all((tmp_path / name).is_dir() for name in ("a/host", "disk"))
    monkeypatch.setenv("LLAMA_SERVER", "/nowhere/llama-server")
    with pytest.raises(EngineSpecError, match=r"no program '/nowhere/llama-server'.*scripts/llama-server"):
        prepare_managed(managed_spec(spec("llama_server", **dirs), words), words)


def test_where_health_is_asked():
    assert [health_path(kind) for kind in ("embedded", "llama_server", "nim", "vllm")] == [
        *("/health", "/health", "/v1/health/ready", "/health")
    ]
