import hashlib
import re
from contextlib import nullcontext

import pytest
from pydantic import ValidationError

from proxy.core.normalise import AGENTS, Rule
from proxy.settings import (
    ApiKeySettings,
    EngineSettings,
    ManagedSettings,
    Settings,
    SettingsError,
    check_settings,
    load_settings,
)
from proxy.settings.engine_settings import repeated_engines

ENGINE = {"kind": "vllm", "url": "http://127.0.0.1:8000", "id": "a"}


@pytest.mark.parametrize("rules", ["agents", ["agents"], ["agents", "paths"]])
def test_a_named_set_of_rules(rules):
    (entry,) = Settings(normalise=[{"rules": rules}]).normalise
    assert set(entry.rules) == AGENTS
    assert Settings(normalise=[{"rules": ["paths", "paths"]}]).normalise[0].rules == (Rule.PATHS, Rule.PATHS)
    with pytest.raises(ValidationError, match="schemas_sorted"):
        Settings(normalise=[{"rules": "agent"}])


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("agnets", "'agnets' is no rule: did you mean 'agents'? The rules are agents, billing_line, "),
        (["paths", "Path"], "'Path' is no rule: did you mean 'paths'? The rules are agents, "),
        (["x" * 99], f"'{'x' * 40}' is no rule: The rules are agents, "),
    ],
)
def test_a_wrong_rule_is_named(rules, said):
    with pytest.raises(ValidationError, match=re.escape(said)):
        Settings(normalise=[{"rules": rules}])


@pytest.mark.parametrize("name", ["admin_key", "metrics_key"])
@pytest.mark.parametrize(
    ("host", "reached"), [("0.0.0.0", "0.0.0.0"), ("127.0.0.1,10.1.2.3", "10.1.2.3"), ("127.0.0.1,::1", "")]
)
def test_keys_of_operators_are_long_where_other_machines_may_guess_them(name, host, reached):
    said = rf"{name} needs at least 16 characters where other machines reach kvpin \({reached}\)"
    refused = pytest.raises(ValidationError, match=said) if reached else nullcontext()
    with refused:
        Settings(host=host, **{name: "k" * 15})
    Settings(host=host, **{name: "k" * 16})
    Settings(host=host, **{name: "sha256:" + 64 * "0"})


def test_a_key_is_what_clients_can_send():
    settings = Settings(admin_key="of operators\n", api_keys=[{"key": " sk-one\r\n"}])
    assert settings.admin_key.get_secret_value() == "of operators"
    assert settings.api_keys[0].digest == hashlib.sha256(b"sk-one").digest()
    for key in ("caf\u00e9", "one\ntwo", "a\0b"):
        with pytest.raises(ValidationError, match="a key must be one line of ASCII"):
            Settings(metrics_key=key)


def test_a_key_without_tenant_is_a_tenant_of_its_own():
    one, same, other = (ApiKeySettings(key=key) for key in ("sk-one", "sk-one", "sk-two"))
    assert one.tenant_id == same.tenant_id != other.tenant_id
    assert "sk-one" not in one.tenant_id
    assert ApiKeySettings(key="sk-one", tenant="team-a").tenant_id == "team-a"
    with pytest.raises(ValidationError, match="tenant"):
        ApiKeySettings(key="sk-two", tenant=one.tenant_id)


def test_a_hashed_key_is_the_same_key():
    digest = hashlib.sha256(b"sk-one").hexdigest()
    plain, hashed = ApiKeySettings(key="sk-one"), ApiKeySettings(key=f"sha256:{digest}")
    assert (plain.digest, plain.tenant_id) == (hashed.digest, hashed.tenant_id)
    with pytest.raises(ValidationError, match="have the same key"):
        Settings(api_keys=[plain, hashed])
    with pytest.raises(ValidationError, match="must differ"):
        Settings(api_keys=[plain], admin_key=f"sha256:{digest}")
    with pytest.raises(ValidationError, match="sha256: and 64 hexadecimal digits"):
        ApiKeySettings(key="sha256:12")


def test_no_secret_shows():
    settings = Settings(
        api_keys=[ApiKeySettings(key="hush-1")],
        admin_key="hush-2",
        engines=[ENGINE | {"api_key": "hush-3"}],
        managed=[{"kind": "vllm", "command": "vllm --port {port} --api-key hush-4", "api_key": "hush-4"}],
        reuse=True,
        exchange={"url": "rediss://:hush-5@h:6379/1"},
    )
    assert settings.exchange.url.get_secret_value() == "rediss://:hush-5@h:6379/1"
    assert "hush" not in f"{settings!r} {settings} {settings.engines[0].spec()!r}"
    assert settings.managed[0].spec(1).api_key == "hush-4"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engines": [ENGINE], "managed": [{"kind": "embedded", "id": "a"}]}, "two engines have the id 'a'"),
        (
            {"api_keys": [{"key": "a"}, {"key": "a", "tenant": "t"}]},
            r"api_keys\[0\] and api_keys\[1\] have the same key",
        ),
        (
            {"api_keys": [{"key": f"{n}", "tenant": "t", "concurrent_requests": n} for n in (1, 2)]},
            "the keys of tenant 't' have different limits",
        ),
        ({"api_keys": [{"key": "a", "requests_per_minute": 0}]}, "greater than 0"),
        ({"api_keys": [{"key": " "}]}, "must not be empty"),
        ({"host": ""}, "name an address"),
        ({"host": "127.0.0.1, ::1"}, "with only commas between them"),
        ({"host": "unix:/tmp/k.sock"}, "not on Unix sockets"),
        ({"health": {"interval_s": float("inf")}}, "finite"),
        *(
            ({"limits": {"body_bytes": text}}, "body_bytes")
            for text in ("-1", "64.000.000", "1.5.2GiB", "1.GiB")
        ),
        ({"record_traffic": "t.jsonl"}, "record_traffic needs reuse"),
        ({"record_traffic": "t.jsonl.gz", "reuse": True}, r"name a file without \.gz"),
        ({"model_aliases": {"a": "b", "b": "m"}}, "'a' stands for 'b', which is an alias too"),
        ({"model_aliases": {"a": ""}}, "model_aliases"),
        *(
            ({"exchange": {"url": url}}, "must be")
            for url in ("unix:run", "unix://run/x", "redis://", "http://h")
        ),
    ],
)
def test_values_that_cannot_be_used(values, message):
    with pytest.raises(ValidationError, match=message):
        Settings(**values)


def test_limits_of_a_tenant_stand_with_one_of_its_keys():
    limited = ApiKeySettings(key="a", tenant="t", requests_per_minute=5)
    settings = Settings(api_keys=[limited, ApiKeySettings(key="b", tenant="t"), ApiKeySettings(key="c")])
    assert settings.tenant_limits == {"t": limited.limits}


def test_a_key_may_name_its_models_and_its_end(tmp_path, monkeypatch):
    file = tmp_path / "kvpin.toml"
    file.write_text('[[api_keys]]\nkey = "a"\nmodels = ["m", "fast"]\nexpires = 2027-01-31T00:00:00Z\n')
    from_file = load_settings(file).api_keys
    text = '[{"key": "a", "models": ["m", "fast"], "expires": "2027-01-31T01:00:00+01:00"}]'
    monkeypatch.setenv("KVPIN_API_KEYS", text)
    from_variable = load_settings().api_keys
    for (key,) in (from_file, from_variable):
        assert (key.models, key.expires.timestamp()) == (("m", "fast"), 1801353600.0)


@pytest.mark.parametrize("text", ["2027-01-31", "2027-01-31T00:00:00", "soon", 1801353600])
def test_the_end_of_a_key_is_a_time_with_its_zone(text):
    with pytest.raises(SettingsError, match="as in 2027-01-31T00:00:00Z") as refused:
        load_settings(api_keys=({"key": "hush", "expires": text},))
    assert "hush" not in str(refused.value)


def test_a_key_for_no_model_is_a_mistake():
    wrong = {
        "models' .* must not be empty": [], r"models\[0\]' .* must be text": [1],
        r"models\[0\]' .* must not be empty": [""], r"models\[1\]' .* must not be blank": ["m", " \t"],
    }  # fmt: skip
    for why, models in wrong.items():
        with pytest.raises(SettingsError, match=rf"'api_keys\[0\]\.{why}") as told:
            load_settings(api_keys=({"key": "a", "models": models},))
        assert "\n" not in str(told.value)


def engine(url="http://127.0.0.1:8000", kind="vllm", **fields):
    return EngineSettings(kind=kind, url=url, **fields)


def test_engines_without_id_are_numbered_by_kind_around_ids_taken():
    settings = Settings(
        engines=[
            engine("http://a:1"), engine("http://b:1", id="vllm-1"), engine("http://c:1"),
            engine("http://d:1", kind="tensorrt-llm"),
        ],
        managed=[ManagedSettings(kind="embedded"), ManagedSettings(kind="embedded", id="main")],
    )  # fmt: skip
    assert [e.id for e in settings.engines] == ["vllm-0", "vllm-1", "vllm-2", "tensorrt_llm-0"]
    assert [e.id for e in settings.managed] == ["embedded-0", "main"]


@pytest.mark.parametrize(
    "url",
    ["http://localhost:8000", "http://127.0.0.1:8000/", "http://[::1]:8000/v1", "http://LOCALHOST:8000/v1/"],
)
def test_one_engine_under_two_names(url):
    assert list(repeated_engines([engine(id="a"), engine(url, id="b")])) == [
        "'a' and 'b' are one engine, at http://127.0.0.1:8000: name it once"
    ]
    assert list(repeated_engines([engine(), engine(url, kind="openai_compatible")])) == [
        "two engines are one engine, at http://127.0.0.1:8000: name it once"
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"dp_rank": 0}, {"dp_rank": 1}),
        ({"model": "a"}, {"model": "b"}),
        ({"headers": {"x-to": "a"}}, {"headers": {"x-to": "b"}}),
        ({"url": "http://127.0.0.1:8000/a"}, {"url": "http://127.0.0.1:8000/b"}),
        ({"url": "http://127.0.0.1"}, {"url": "https://127.0.0.1"}),
    ],
)
def test_several_engines_of_one_server(one, other):
    assert list(repeated_engines([engine(**one), engine(**other)])) == []
    assert list(repeated_engines([engine(**one), engine(**one)])) != []


def test_all_that_does_not_go_together_is_told_at_once():
    flags = {"record_traffic": "t.gz", "workers": 2, "exchange": {"url": "unix:/x"}}
    assert len(check_settings(**flags, engines=[engine(), engine()])[1]) == 4  # workers may record
