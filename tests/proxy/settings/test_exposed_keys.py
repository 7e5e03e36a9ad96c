"""Keys that other users of the machine can read."""

import pytest

from proxy.server.checks import warnings_of
from proxy.settings import load_settings, parse_engine_flag

FILE = """
{}
[[engines]]
kind = "vllm"
url = "http://h:1"
{}
"""
HASHED = f"sha256:{'0' * 64}"


def warnings(config=None, **flags):
    return list(warnings_of(load_settings(config, **flags)))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"api_keys": ({"key": "sk-1"}, {"key": "sk-2"})}, ["--api-key"]),
        ({"admin_key": "hush" * 8}, ["--admin-key"]),
        ({"engines": (parse_engine_flag("vllm=http://h:1,api_key=hush"),)}, ["--engine"]),
        ({"api_keys": ({"key": HASHED},), "admin_key": HASHED.replace("0", "1")}, []),
        ({"engines": (parse_engine_flag("vllm=http://h:1,key=/a/file"),)}, []),
        ({}, []),
    ],
)
def test_keys_in_flags(flags, named):
    found = warnings(**flags)
    assert [text.split()[9] for text in found] == [f"{name}," for name in named]
    assert not any("hush" in text or "sk-1" in text for text in found)


def test_keys_in_variables_are_not_seen(monkeypatch):
    monkeypatch.setenv("KVPIN_ADMIN_KEY", "hush" * 8)
    monkeypatch.setenv("KVPIN_API_KEYS", '[{"key": "sk-1"}]')
    assert warnings() == []


@pytest.mark.parametrize("mode", [0o644, 0o602, 0o620, 0o600, 0o640])
@pytest.mark.parametrize(
    ("text", "has_key"),
    [
        (FILE.format("", 'api_key = "hush"'), True),
        (FILE.format(f'admin_key = "{"hush" * 8}"', ""), True),
        (FILE.format("", '[[api_keys]]\nkey = "sk-1"'), True),
        (FILE.format("", f'[[api_keys]]\nkey = "{HASHED}"'), False),
        (FILE.format("", 'key = "/a/file"'), False),
    ],
)
def test_a_settings_file_that_others_can_read(tmp_path, mode, text, has_key):
    path = tmp_path / "kvpin.toml"
    path.write_text(text)
    path.chmod(mode)
    told = f"others may read or change {str(path)!r} (mode {mode:o}), which holds keys: chmod 600 it"
    assert warnings(path) == ([told] if has_key and mode not in (0o600, 0o640) else [])


def test_a_list_in_the_file_that_a_variable_replaces(tmp_path, monkeypatch):
    path = tmp_path / "kvpin.toml"
    path.write_text('api_keys = 5\nadmin_key = "{}"'.format("hush" * 8))
    path.chmod(0o644)
    monkeypatch.setenv("KVPIN_API_KEYS", "[]")
    assert len(warnings(path)) == 1
