import sys

import pytest

from engine_adapter import EngineSpecError, managed_kind, run_engine_cli
from engine_adapter.llama_server.command import default_save_bytes, default_save_dir
from tests.engines import engine_spec


def spec(kind, **fields):
    return engine_spec(kind, "http://127.0.0.1:4711", **fields)


def command(kind, *words, **fields):
    return managed_kind(kind).command(words, 4711, managed_kind(kind).complete(spec(kind, **fields), words))


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
    by_default = managed_kind("llama_server").complete(spec("llama_server"), words)
    assert by_default.options.host_cache_dir == str(default_save_dir())
    assert by_default.options.host_cache_bytes == default_save_bytes(default_save_dir())
    given = spec("llama_server", host_cache_dir="/kv", host_cache_bytes=7, api_key="k")
    assert managed_kind("llama_server").complete(given, words) == given
    words = ("-m", "x", "--slot-save-path", "/mine/", "--api-key", "hush")
    named = managed_kind("llama_server").complete(spec("llama_server", host_cache_bytes=7), words)
    assert (named.options.host_cache_dir, named.options.host_cache_bytes, named.api_key) == (
        "/mine",
        7,
        "hush",
    )
    assert (
        managed_kind("llama_server")
        .complete(spec("llama_server", host_cache_dir="/mine"), words)
        .options.host_cache_dir
        == "/mine"
    )


def test_directories_are_whole_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    given = spec("llama_server", host_cache_dir="~/kv", host_cache_bytes=7, disk_cache_dir="cold")
    completed = managed_kind("llama_server").complete(given, ("-m", "x"))
    assert (completed.options.host_cache_dir, completed.options.disk_cache_dir) == (
        "/home/me/kv",
        str(tmp_path / "cold"),
    )
    named = managed_kind("llama_server").complete(
        spec("llama_server"), ("-m", "x", "--slot-save-path", "hot")
    )
    assert named.options.host_cache_dir == str(tmp_path / "hot")


def test_two_directories_for_one_thing_are_refused():
    words = ("-m", "x", "--slot-save-path", "/a")
    with pytest.raises(EngineSpecError, match=r"'/a' and host_cache_dir '/b' differ: give one of them"):
        managed_kind("llama_server").complete(spec("llama_server", host_cache_dir="/b"), words)


@pytest.mark.parametrize("kind", ["embedded", "vllm"])
def test_other_kinds_are_as_the_operator_said(kind):
    assert managed_kind(kind).complete(spec(kind), ("x", "--api-key", "k")) == spec(kind)
    assert managed_kind(kind).advice(("-kvu",)) == ()


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
        managed_kind(kind).check(words)


def test_an_engine_whose_program_is_missing_is_told(monkeypatch):
    managed_kind("vllm").prepare(spec("vllm"), (sys.executable, "{port}"))
    with pytest.raises(EngineSpecError, match="no program '/nowhere/vllm'"):
        managed_kind("vllm").prepare(spec("vllm"), ("/nowhere/vllm", "{port}"))
    monkeypatch.setattr("engine_adapter.registry.find_spec", lambda _name: None)
    with pytest.raises(EngineSpecError, match=r"pip install 'kvpin\[engine\]'"):
        managed_kind("embedded").prepare(spec("embedded"), ())


def test_what_a_llama_server_needs_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_SERVER", "true")
    (tmp_path / "m.gguf").touch()
    dirs = {"host_cache_dir": str(tmp_path / "a" / "host"), "disk_cache_dir": str(tmp_path / "disk")}
    words = ("-m", str(tmp_path / "m.gguf"))
    managed_kind("llama_server").prepare(
        managed_kind("llama_server").complete(spec("llama_server", **dirs), words), words
    )
    assert all((tmp_path / name).is_dir() for name in ("a/host", "disk"))
    monkeypatch.setenv("LLAMA_SERVER", "/nowhere/llama-server")
    with pytest.raises(EngineSpecError, match=r"no program '/nowhere/llama-server'.*scripts/llama-server"):
        managed_kind("llama_server").prepare(
            managed_kind("llama_server").complete(spec("llama_server", **dirs), words), words
        )


def test_the_help_of_the_engine(capsys):
    with pytest.raises(SystemExit) as caught:
        run_engine_cli(["--help"])
    assert caught.value.code == 0
    assert "--tokens-per-block" in capsys.readouterr().out


def test_without_torch_the_engine_says_what_to_install(monkeypatch):
    monkeypatch.setattr("engine_adapter.registry.find_spec", lambda name: None)
    with pytest.raises(EngineSpecError, match=r"kvpin\[engine\]"):
        run_engine_cli([])
