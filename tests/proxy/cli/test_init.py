import tomllib

import pytest

from proxy.server import run
from tests.fake_engines.vllm import running_vllm


@pytest.fixture
def file(tmp_path):
    return tmp_path / "kvpin.toml"


@pytest.mark.live
def test_serve_takes_what_it_writes(kvpin, embedded_engine, file, monkeypatch, tokenizer_dir):
    with running_vllm(replay_endpoint=False) as vllm:
        given = f"openai_compatible={embedded_engine.url},tokenizer={tokenizer_dir},headers=x-to: 2"
        result = kvpin("init", embedded_engine.url, vllm.url, given, "--output", str(file))
    assert result.exit_code == 0, result.output
    assert result.stdout == f"wrote {file}; start with: kvpin serve --config {file}\n"
    served = []
    monkeypatch.setattr(run, "serve", lambda load: served.append(load()) or 0)
    assert kvpin("config", "check", "--config", str(file)).exit_code == 0
    assert kvpin("serve", "--config", str(file)).exit_code == 0
    settings = served[0]
    assert [(engine.kind, engine.url) for engine in settings.engines] == [
        ("embedded", embedded_engine.url),
        ("vllm", vllm.url),
        ("openai_compatible", embedded_engine.url),
    ]
    assert settings.engines[2].tokenizer == str(tokenizer_dir)
    assert settings.reuse
    text = file.read_text()
    assert "# vllm " in text
    assert '# Remedy: give --kv-events-config a "replay_endpoint"' in text


@pytest.mark.live
def test_no_file_is_replaced_unasked(kvpin, embedded_engine, file):
    file.write_text("mine")
    words = ("init", embedded_engine.url, "--output", str(file))
    result = kvpin(*words)
    assert (result.exit_code, file.read_text()) == (1, "mine")
    assert "exists: name another file with --output, or give --force" in result.stderr
    result = kvpin(*words[:-1], str(file.parent / ("long" * 100)))
    assert (result.exit_code, "cannot be written: File name too long" in result.stderr) == (1, True)
    file.chmod(0o644)
    assert kvpin(*words, "--force").exit_code == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert tomllib.loads(file.read_text())["engines"][0]["kind"] == "embedded"
    file.unlink()
    assert kvpin(*words).exit_code == 0
    assert file.stat().st_mode & 0o777 == 0o600
