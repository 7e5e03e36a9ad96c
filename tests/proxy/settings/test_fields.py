import pytest

from proxy.settings import SettingsError, load_settings


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("*", "*"),
        ("https://Chat.Example", "https://chat.example"),
        ("https://chat.example:443", "https://chat.example"),
        ("http://chat.example:80", "http://chat.example"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://[::1]:80", "http://[::1]"),
        ("tauri://localhost", "tauri://localhost"),
        ("app://obsidian.md", "app://obsidian.md"),
        ("app://-", "app://-"),
        ("vscode-file://vscode-app", "vscode-file://vscode-app"),
    ],
)
def test_an_origin_is_as_browsers_send_it(given, origin):
    assert load_settings(cors_origins=[given]).cors_origins == (origin,)


@pytest.mark.parametrize(
    "given",
    ["", "chat.example", "https://chat.example/", "https://chat.example/x", "https://u@chat.example", "null",
     "https://*.example", "https://chat.example:", "https://chat.example:port", "https://", "https://a b"],
)  # fmt: skip
def test_what_is_no_origin_is_refused_at_start(given):
    with pytest.raises(SettingsError, match=r"'cors_origins.0.'.*an origin must look like https://host"):
        load_settings(cors_origins=[given])


@pytest.mark.parametrize(
    "url",
    ["gpu:8000", "http://", "http://u:p@gpu", "http://gpu?x=1", "http://gpu#x", "http://gpu:0", "http://a b"],
)
def test_what_is_no_address_of_an_engine_is_refused(url):
    with pytest.raises(SettingsError, match=r"'engines\[0\]\.url'.*an address must"):
        load_settings(engines=[{"kind": "vllm", "url": url}])
