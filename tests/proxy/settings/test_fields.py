import pytest
from pydantic import ValidationError

from proxy.settings import (
    DiscoverySettings,
    DnsSource,
    KubernetesSource,
    SettingsError,
    SrvSource,
    load_settings,
)
from proxy.settings.fields import parse_source


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("*", "*"),
        ("https://Chat.Example", "https://chat.example"),
        ("https://chat.example:443", "https://chat.example"),
        ("http://chat.example:80", "http://chat.example"),
        ("http://[::1]:80", "http://[::1]"),
        ("tauri://localhost", "tauri://localhost"),
        ("app://-", "app://-"),
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


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("dns://vllm.llm.svc:8000", DnsSource("vllm.llm.svc", 8000)),
        ("srv://_http._tcp.vllm.llm.svc.", SrvSource("_http._tcp.vllm.llm.svc.")),
        ("kubernetes:///vllm", KubernetesSource("", "kubernetes.io/service-name=vllm", "")),
        ("kubernetes://llm/vllm:http", KubernetesSource("llm", "kubernetes.io/service-name=vllm", "http")),
        ("kubernetes://llm/:8000?app=vllm,tier!=dev", KubernetesSource("llm", "app=vllm,tier!=dev", "8000")),
    ],
)
def test_what_is_read(text, source):
    assert parse_source(text) == source


@pytest.mark.parametrize(
    "text",
    [
        "http://a:1", "dns://a", "dns://a:0", "dns://a:70000", "dns://a/b:1", "srv://", "kubernetes://llm",
        "kubernetes://llm/", "kubernetes://llm/a?b=c", "kubernetes://llm/../nodes",
    ],
)  # fmt: skip
def test_what_is_refused(text):
    with pytest.raises(ValueError, match=r"must look like dns://NAME:PORT, srv://NAME"):
        parse_source(text)
    with pytest.raises(ValidationError):
        DiscoverySettings(source=text, kind="vllm")


@pytest.mark.parametrize(
    ("prefix", "name", "host", "engine_id", "url"),
    [
        ("", "10.0.0.5-8000", "10.0.0.5", "10.0.0.5-8000", "http://10.0.0.5:8000"),
        ("a", "fd00::5-8000", "fd00::5", "a-fd00..5-8000", "http://[fd00::5]:8000"),
        ("", "p" * 70, "h", "p" * 55 + "-345b9c92", "http://h:8000"),
    ],
)
def test_the_engines_of_a_source_have_its_settings_and_names_of_their_own(prefix, name, host, engine_id, url):
    given = {"source": "dns://x:8000", "kind": "vllm", "api_key": "k", "events": "tcp://x:5557"}
    settings = DiscoverySettings.model_validate(given | ({"id": prefix} if prefix else {}))
    found = settings.engine(name, host, 8000)
    assert (found.id, found.url) == (engine_id, url)
    spec = found.spec()
    assert (spec.kind, spec.api_key, spec.options.events) == ("vllm", "k", "tcp://x:5557")


@pytest.mark.parametrize(
    ("host", "port"), [("a@b", 1), ("a/v2", 1), ("a b", 1), ("\\000", 1), ("a", 0), ("a", 70_000)]
)
def test_a_host_that_no_address_may_have(host, port):
    settings = DiscoverySettings(source="srv://x", kind="vllm")
    with pytest.raises(SettingsError, match=r"srv://x names '.*', which is no address of an engine"):
        settings.engine("a", host, port)
