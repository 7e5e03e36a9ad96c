"""The admin key in a file of its own, and keys that other users of the machine can read."""

import os
import stat

import pytest

from proxy.server.checks import warnings_of
from proxy.settings import SettingsError, check_settings, load_settings, loading, parse_engine_flag
from proxy.settings.loading import key_in


def test_a_missing_file_is_made_with_a_random_key_for_its_owner_alone(tmp_path):
    file = tmp_path / "admin.key"
    umask = os.umask(0)
    try:
        key = key_in(file)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (key_in(file), file.read_text()) == (key, f"{key}\n")
    assert list(tmp_path.iterdir()) == [file]
    assert len(key) > 40
    assert key_in(tmp_path / "other.key") != key


def test_two_that_make_it_at_once_take_the_same_key(tmp_path, monkeypatch):
    file, link = tmp_path / "admin.key", os.link

    def later(source, target):
        file.write_text("of another kvpin")
        file.chmod(0o600)
        link(source, target)

    monkeypatch.setattr(os, "link", later)
    assert key_in(file) == "of another kvpin"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("key", 0o644, "chmod 600"),
        ("key", 0o620, "chmod 600"),
        ("", 0o600, "one key, in one line"),
        ("one\ntwo\n", 0o600, "one key, in one line"),
        ("k" * 4097, 0o600, "more than 4096 characters"),
        ("k" * 4096 + "\n", 0o600, "more than 4096 characters"),
    ],
)
def test_a_file_that_protects_nothing_is_refused(tmp_path, text, mode, said):
    file = tmp_path / "admin.key"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ValueError, match=said):
        key_in(file)


def test_a_file_of_another_user_is_refused(tmp_path, monkeypatch):
    """They can read it, and change it. Root can anyway: a Secret of Kubernetes is root's."""
    file = tmp_path / "admin.key"
    file.write_text("key")
    file.chmod(0o600)
    owner = file.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(loading, "_ROOT", owner)
    assert key_in(file) == "key"
    monkeypatch.setattr(loading, "_ROOT", owner + 2)
    with pytest.raises(ValueError, match="belongs to another user"):
        key_in(file)


def test_what_is_no_file_is_refused(tmp_path):
    pipe, dangling, binary = tmp_path / "pipe", tmp_path / "dangling", tmp_path / "binary"
    os.mkfifo(pipe, 0o600)
    dangling.symlink_to(tmp_path / "nothing")
    binary.write_bytes(b"\xff")
    binary.chmod(0o600)
    for path in (tmp_path, pipe, dangling, binary, tmp_path / "nowhere" / "admin.key"):
        with pytest.raises(ValueError, match=r"is not|neither"):
            key_in(path)


def test_it_is_the_admin_key_of_the_settings(tmp_path, monkeypatch):
    file = tmp_path / "admin.key"
    monkeypatch.setenv("KVPIN_ADMIN_KEY_FILE", str(file))
    assert check_settings()[0].admin_key is None
    assert not file.exists()
    settings = load_settings()
    assert settings.admin_key is not None
    assert settings.admin_key.get_secret_value() == file.read_text().strip()
    assert settings.admin_key.get_secret_value() not in repr(settings)
    with pytest.raises(SettingsError, match="admin_key and admin_key_file are both set"):
        load_settings(admin_key="a")
    with pytest.raises(SettingsError, match="admin_key must differ from every key in api_keys"):
        load_settings(api_keys=[{"key": file.read_text().strip()}])
    file.chmod(0o604)
    with pytest.raises(SettingsError, match="setting 'admin_key_file' cannot be used: others may read"):
        load_settings()


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
        ({"engines": (parse_engine_flag("vllm=http://h:1,headers=X-Key: hush"),)}, ["--engine"]),
        ({"engines": (parse_engine_flag("vllm=http://h:1,headers=X-Team: monkey"),)}, []),
        ({"exchange": {"url": "redis://:hush@h"}, "reuse": True}, ["--exchange"]),
        ({"exchange": {"url": "redis://h"}, "reuse": True}, []),
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
        (FILE.format('record_traffic_key = "hush"', ""), True),
        (FILE.format("", 'headers = { X-Key = "hush" }'), True),
        (FILE.format("", 'headers = "Authorization: hush"'), True),
        (FILE.format("", 'headers = { X-Team = "hush" }'), False),
        (FILE.format('reuse = true\nexchange.url = "rediss://u:hush@h"', ""), True),
        (FILE.format('reuse = true\nexchange.url = "unix:/run/kvpin"', ""), False),
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
    path.write_text('api_keys = 5\nadmin_key = "{}"\nexchange.url = "http://["'.format("hush" * 8))
    path.chmod(0o644)
    monkeypatch.setenv("KVPIN_API_KEYS", "[]")
    monkeypatch.setenv("KVPIN_EXCHANGE__URL", "unix:/run/kvpin")
    monkeypatch.setenv("KVPIN_REUSE", "1")
    assert len(warnings(path)) == 1
