import sys

import pytest

from engine_adapter import (
    NATIVE_ROUTES,
    EngineSpec,
    EngineSpecError,
    OptionError,
    check_kind,
    make_adapter,
    make_options,
    managed_kind,
    run_engine_cli,
)
from engine_adapter.events.options import EventAddresses, EventOptions
from engine_adapter.llama_server.command import default_save_bytes, default_save_dir
from engine_adapter.vllm.options import VllmOptions
from tests.engines import engine_spec


def test_an_unknown_kind_is_refused_with_those_there_are():
    with pytest.raises(EngineSpecError, match=r"unknown engine kind 'tgi': use one of embedded, .*vllm"):
        make_adapter(EngineSpec("tgi", "http://127.0.0.1:1", "e"))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("vlm", "vllm"),
        ("llama", "llama_server"),
        ("openai", "openai_compatible"),
        ("tensorrt", "tensorrt_llm"),
    ],
)
def test_a_misspelt_kind_is_refused_with_the_nearest(wrong, right):
    with pytest.raises(EngineSpecError, match=f"unknown engine kind '{wrong}': did you mean '{right}'"):
        check_kind(wrong)


def test_options_are_those_of_the_kind():
    assert make_options("vllm", {"dp_rank": "1"}) == VllmOptions(dp_rank=1)
    with pytest.raises(OptionError, match="embedded engines have no option 'dp_rank'"):
        make_options("embedded", {"dp_rank": "1"})
    with pytest.raises(EngineSpecError, match="did you mean 'vllm'"):
        make_options("vlm", {})


async def test_a_nim_hands_on_the_options_that_the_engine_inside_has():
    nim = make_adapter(engine_spec("nim", "http://127.0.0.1:1", dp_rank=1, lmcache="http://h:2"))
    inside = {kind: nim._as_kind(nim.spec, kind) for kind in ("vllm", "sglang", "tensorrt_llm")}
    assert inside["vllm"].spec.options == VllmOptions(dp_rank=1, lmcache="http://h:2")
    assert inside["sglang"].spec.options == EventOptions(dp_rank=1)
    assert inside["tensorrt_llm"].spec.options == EventAddresses()
    for adapter in (nim, *inside.values()):
        await adapter.aclose()


# What changes an engine for everybody, tells of everybody, or reaches beyond the engine.
OPERATORS = {
    "/metrics",
    "/slots/0",
    "/tools",
    "/cors-proxy",
    "/flush_cache",
    "/reset_prefix_cache",
    "/sleep",
    "/pause",
    "/server_info",
    "/load_lora_adapter",
    "/kv/flush",
    "/invocations",
    "/health",
}


def test_no_route_is_an_operators_or_below_v1():
    assert not OPERATORS & NATIVE_ROUTES.keys()
    assert not any(path.startswith(("/v1/", "/admin")) for path in NATIVE_ROUTES)
    assert all(route.method in ("GET", "POST") for route in NATIVE_ROUTES.values())


def spec(kind, **fields):
    return engine_spec(kind, "http://127.0.0.1:4711", **fields)


def command(kind, *words, **fields):
    return managed_kind(kind).command(words, 4711, managed_kind(kind).complete(spec(kind, **fields), words))


def completed(*words, **fields):
    """A description of a llama-server that was started with these words and `-m x`."""
    return managed_kind("llama_server").complete(spec("llama_server", **fields), ("-m", "x", *words))


def test_each_kind_has_its_command_line():
    assert command("embedded", "--kv-blocks", "64") == [
        *(sys.executable, "-m", "engine_adapter.torch_engine", "--exit-with-parent"),
        *("--port", "4711", "--kv-blocks", "64"),
    ]
    assert command("vllm", "vllm", "serve", "--port={port}") == ["vllm", "serve", "--port=4711"]
    llama = command("llama_server", "-m", "x", host_cache_dir="/kv", host_cache_bytes=1)
    assert llama[llama.index("--slot-save-path") + 1] == "/kv/"


def test_the_binary_of_a_llama_server_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("LLAMA_SERVER", "/opt/llama-server")
    assert command("llama_server", "-m", "x")[0] == "/opt/llama-server"
    assert command("llama_server", "mine", "-m", "x")[0] == "mine"


def test_a_llama_server_gets_a_host_cache():
    by_default = completed()
    assert by_default.options.host_cache_dir == str(default_save_dir())
    assert by_default.options.host_cache_bytes == default_save_bytes(default_save_dir())
    given = {"host_cache_dir": "/kv", "host_cache_bytes": 7, "api_key": "k"}
    assert completed(**given) == spec("llama_server", **given)
    named = completed("--slot-save-path", "/mine/", "--api-key", "hush", host_cache_bytes=7)
    assert (named.options.host_cache_dir, named.options.host_cache_bytes) == ("/mine", 7)
    assert named.api_key == "hush"
    both = completed("--slot-save-path", "/mine/", host_cache_dir="/mine")
    assert both.options.host_cache_dir == "/mine"


def test_directories_are_whole_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    options = completed(host_cache_dir="~/kv", host_cache_bytes=7, disk_cache_dir="cold").options
    assert (options.host_cache_dir, options.disk_cache_dir) == ("/home/me/kv", str(tmp_path / "cold"))
    assert completed("--slot-save-path", "hot").options.host_cache_dir == str(tmp_path / "hot")


def test_two_directories_for_one_thing_are_refused():
    with pytest.raises(EngineSpecError, match=r"'/a' and host_cache_dir '/b' differ: give one of them"):
        completed("--slot-save-path", "/a", host_cache_dir="/b")


@pytest.mark.parametrize("kind", ["embedded", "vllm"])
def test_other_kinds_are_as_the_operator_said(kind):
    assert managed_kind(kind).complete(spec(kind), ("x", "--api-key", "k")) == spec(kind)
    assert managed_kind(kind).advice(("-kvu",)) == ()


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("embedded", ("--port", "1"), "--port is chosen by kvpin"),
        ("embedded", ("--host=0.0.0.0",), "--host is chosen by kvpin"),
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
    for start in (lambda: managed_kind("embedded").prepare(spec("embedded"), ()), lambda: run_engine_cli([])):
        with pytest.raises(EngineSpecError, match=r"pip install 'kvpin\[engine\]'"):
            start()


def test_what_a_llama_server_needs_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_SERVER", "true")
    (tmp_path / "m.gguf").touch()
    dirs = {"host_cache_dir": str(tmp_path / "a" / "host"), "disk_cache_dir": str(tmp_path / "disk")}
    words = ("-m", str(tmp_path / "m.gguf"))
    described = managed_kind("llama_server").complete(spec("llama_server", **dirs), words)
    managed_kind("llama_server").prepare(described, words)
    assert all((tmp_path / name).is_dir() for name in ("a/host", "disk"))


def test_the_help_of_the_engine(capsys):
    with pytest.raises(SystemExit) as caught:
        run_engine_cli(["--help"])
    assert caught.value.code == 0
    assert "--tokens-per-block" in capsys.readouterr().out
