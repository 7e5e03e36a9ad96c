import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from proxy.server import run
from scripts.make_gguf import gguf_path
from tests.live.answers import until
from tests.live.conftest import running_kvpin
from tests.llama import llama_server
from tests.processes import is_alive


@pytest.fixture
def served(monkeypatch):
    """The settings the server was started with."""
    seen = []

    def take(load):
        seen.append(load())
        return 0

    monkeypatch.setattr(run, "serve", take)
    return seen


def test_flags_become_settings(kvpin, served, tmp_path):
    config = tmp_path / "kvpin.toml"
    config.write_text('port = 7\nretries = 1\n[logs]\nlevel = "error"\n')
    words = ["serve", "--config", str(config), "--port", "9", "--reuse", "--admin-key", "a"]
    words += ["--engine", "vllm=http://g:1", "--engine", "nim=http://h:2,id=n"]
    words += ["--managed", "embedded: --kv-blocks 64", "--api-key", "k1", "--api-key", "k2"]
    words += ["--model-alias", "gpt-4o=m", "--model-alias", "gpt-5=m", "--default-model", "m"]
    words += ["--cors-origin", "https://chat.example", "--cors-origin", "http://localhost:3000"]
    result = kvpin(*words, "--log-format", "json", "--record-traffic", "t.jsonl", "--state-dir", "s")
    assert result.exit_code == 0, result.output
    (settings,) = served
    assert (settings.port, settings.retries, settings.reuse) == (9, 1, True)
    assert [engine.id for engine in settings.engines] == ["vllm-0", "n"]
    assert settings.managed[0].command == ("--kv-blocks", "64")
    assert [entry.key.get_secret_value() for entry in settings.api_keys] == ["k1", "k2"]
    assert len({entry.tenant_id for entry in settings.api_keys}) == 2
    assert settings.admin_key.get_secret_value() == "a"
    assert (settings.model_aliases, settings.default_model) == ({"gpt-4o": "m", "gpt-5": "m"}, "m")
    assert settings.cors_origins == ("https://chat.example", "http://localhost:3000")
    assert settings.record_traffic == Path("t.jsonl")
    assert settings.state_dir == Path("s")
    assert (settings.logs.format, settings.logs.level) == ("json", "error")


@pytest.mark.parametrize("name", ["engines-file", "admin-key-file", "state-dir", "record-traffic"])
def test_an_empty_path_is_not_the_working_directory(kvpin, served, name):
    result = kvpin("serve", f"--{name}", "", "--reuse")
    assert (result.exit_code, served) == (2, [])
    assert "(given as a flag) cannot be used: a path must not be empty" in result.output


def test_an_engine_to_start_may_be_given_as_any_other(kvpin, served):
    words = ["--engine", "llama-server: -m m.gguf -np 2", "--engine", "nim=http://h:2"]
    result = kvpin("serve", *words, "--managed", "llama_server: mine -m n.gguf")
    assert result.exit_code == 0, result.output
    (settings,) = served
    assert [engine.id for engine in settings.engines] == ["nim-0"]
    assert [(engine.id, engine.command) for engine in settings.managed] == [
        ("llama_server-0", ("-m", "m.gguf", "-np", "2")),
        ("llama_server-1", ("mine", "-m", "n.gguf")),
    ]


def test_no_reuse_wins_over_the_switch(kvpin, served):
    kvpin("serve", env={"ENABLE_KV_CACHE_REUSE": "1"})
    kvpin("serve", "--no-reuse", env={"ENABLE_KV_CACHE_REUSE": "1"})
    assert [settings.reuse for settings in served] == [True, False]


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m proxy.cli --help | head -1; exit ${{PIPESTATUS[0]}}"
    output = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert output.stdout.startswith("Usage:")
    assert "Traceback" not in output.stderr


def test_the_engines_own_options_are_passed_through(kvpin):
    pytest.importorskip("torch")
    result = kvpin("engine", "--help")
    assert result.exit_code == 0
    assert "--tokens-per-block" in result.output
    result = kvpin("engine", "--tokens-per-block", "17", "--port", "0")
    assert result.exit_code == 2
    assert "power of two" in result.stderr


def test_without_torch_one_sentence_says_what_to_install(kvpin, monkeypatch):
    monkeypatch.setattr("engine_adapter.registry.find_spec", lambda _name: None)
    result = kvpin("engine", "--port", "1")
    assert result.exit_code == 1
    assert result.stderr == "kvpin: the embedded engine needs torch: pip install 'kvpin[engine]'\n"


@pytest.mark.skipif(sys.platform != "linux", reason="a signal of Linux")
def test_a_llama_server_has_a_key_and_ends_even_when_kvpin_is_killed(monkeypatch, tmp_path):
    monkeypatch.setenv("LLAMA_SERVER", llama_server())
    command = f"-m {gguf_path('tiny')} -np 4 -c 2048 -t 1 --slot-save-path {tmp_path / 'kv'}"
    with running_kvpin(tmp_path / "log", "--engine", f"llama-server: {command}") as kvpin:
        (engine,) = kvpin.admin("GET", "engines").json()["engines"]
        pid, slots = engine["process"]["pid"], f"{engine['url']}/slots"
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        (key,) = [each[14:].decode() for each in environment if each.startswith(b"LLAMA_API_KEY=")]
        assert httpx.get(slots, trust_env=False).status_code == 401
        answer = httpx.get(slots, headers={"authorization": f"Bearer {key}"}, trust_env=False)
        assert answer.json()[0]["n_ctx"] == 512
        kvpin.kill()
        until(lambda: not is_alive(pid))
