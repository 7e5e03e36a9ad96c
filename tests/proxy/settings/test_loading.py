import pytest

from proxy.settings import EngineSettings, SettingsError, load_settings

FILE = """
port = 9000
default_model = "m"
reuse = true
retries = 1

[model_aliases]
"gpt-4o" = "m"

[limits]
body_bytes = "1MiB"
request_records = 7

[[managed]]
kind = "llama-server"
command = "-m model.gguf -np 2"
host_cache_dir = "/mem/kv"
host_cache_bytes = "1GiB"

[[api_keys]]
key = "sk-1"
tenant = "a"
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "kvpin.toml"
        path.write_text(text)
        return path

    return write


def test_a_file_sets_everything(write):
    settings = load_settings(write(FILE))
    assert (settings.port, settings.reuse, settings.retries) == (9000, True, 1)
    assert (settings.limits.body_bytes, settings.limits.request_records) == (2**20, 7)
    spec = settings.managed[0].spec(4711)
    assert (spec.kind, spec.url, spec.id) == ("llama_server", "http://127.0.0.1:4711", "llama_server-0")
    assert (spec.options.host_cache_dir, spec.options.host_cache_bytes) == ("/mem/kv", 2**30)
    assert settings.api_keys[0].tenant_id == "a"
    assert (settings.model_aliases, settings.default_model) == ({"gpt-4o": "m"}, "m")


def test_flags_win_over_variables_and_these_over_the_file(write, monkeypatch):
    monkeypatch.setenv("KVPIN_PORT", "9001")
    monkeypatch.setenv("KVPIN_RETRIES", "3")
    monkeypatch.setenv("kvpin_limits__body_bytes", "2MiB")
    settings = load_settings(write(FILE), port=9002, host=None, limits={"prompt_table_bytes": 5})
    assert (settings.port, settings.retries, settings.host) == (9002, 3, "127.0.0.1")
    limits = settings.limits
    assert (limits.body_bytes, limits.request_records, limits.prompt_table_bytes) == (2 * 2**20, 7, 5)


def test_lists_come_from_variables_as_json_and_from_flags_as_objects(monkeypatch):
    monkeypatch.setenv("KVPIN_MODEL_ALIASES", '{"gpt-5": "n"}')
    assert load_settings().model_aliases == {"gpt-5": "n"}
    monkeypatch.setenv("KVPIN_ENGINES", '[{"kind": "sglang", "url": "http://127.0.0.1:1"}]')
    assert load_settings().engines[0].kind == "sglang"
    flag = EngineSettings(kind="vllm", url="http://127.0.0.1:2")
    assert [e.kind for e in load_settings(engines=[flag]).engines] == ["vllm"]


def test_the_file_can_be_named_by_a_variable(write, monkeypatch):
    monkeypatch.setenv("KVPIN_CONFIG", str(write("port = 9003")))
    assert load_settings().port == 9003


@pytest.mark.parametrize("name", ["ENABLE_KV_CACHE_REUSE", "NIM_ENABLE_KV_CACHE_REUSE"])
@pytest.mark.parametrize(
    ("text", "reuse"), [("", False), ("1", True), ("True", True), ("0", False), ("false", False)]
)
def test_the_reuse_switch(monkeypatch, name, text, reuse):
    monkeypatch.setenv(name, text)
    assert load_settings().reuse is reuse


def test_the_switch_wins_over_the_file_and_loses_to_ours(write, monkeypatch):
    monkeypatch.setenv("ENABLE_KV_CACHE_REUSE", "0")
    assert load_settings(write("reuse = true")).reuse is False
    monkeypatch.setenv("KVPIN_REUSE", "1")
    assert load_settings().reuse is True
    assert load_settings(reuse=False).reuse is False


def refused(path=None):
    """The one sentence that refuses the settings."""
    with pytest.raises(SettingsError) as caught:
        load_settings(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_two_switches_that_contradict_each_other(monkeypatch):
    monkeypatch.setenv("ENABLE_KV_CACHE_REUSE", "1")
    monkeypatch.setenv("NIM_ENABLE_KV_CACHE_REUSE", "0")
    assert "ENABLE_KV_CACHE_REUSE contradict each other: set only one" in refused()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ENABLE_KV_CACHE_REUSE", "maybe", "environment variable {} is 'maybe': use 1, 0, true or false"),
        ("KVPIN_LIMITS", '{"body": 1}', "setting 'limits.body' ({of} {}) {wrong} there is no such"),
        ("KVPIN_ENGINES", "vllm=http://x:1", "setting 'engines' ({of} {}) {wrong} the variable must"),
        ("KVPIN_PORT", "many", "setting 'port' ({of} {}) {wrong} it must be a whole number"),
        ("KVPIN_RETRIES", "-1", "setting 'retries' ({of} {}) {wrong} it must be at "),
        ("KVPIN_PROT", "1", "unknown {name}: did you mean 'KVPIN_PORT'?"),
        ("KVPIN_LIMITS__BODY", "1", "unknown {name}: did you mean 'KVPIN_LIMITS__BODY_BYTES'?"),
        ("KVPIN_PORT__X", "1", "unknown {name}: this setting has no parts"),
        ("KVPIN_HEALTH__ZZZ", "1", "unknown {name}: known here: KVPIN_HEALTH__INTERVAL_S, "),
    ],
)
def test_a_variable_that_is_wrong_is_named(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    words = {"of": "from environment variable", "wrong": "cannot be used:"}
    assert refused().startswith(message.format(name, name=f"environment variable {name!r}", **words))


ENGINE = "[[engines]]\nkind = 'vllm'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "unknown setting 'prot' in {file}: did you mean 'port'?"),
        (
            "[limits]\nrecords = 1",
            "unknown setting 'limits.records' in {file}: did you mean 'request_records'?",
        ),
        (
            f"{ENGINE}url = 'http://x'\ntokeniser = 'x'",
            "unknown setting 'engines[0].tokeniser' in {file}: did ",
        ),
        (ENGINE, "setting 'engines[0].url' {wrong}: it is missing"),
        (
            f"{ENGINE}url = 'x:1'",
            "setting 'engines[0].url' {wrong}: an address must look like http://host:port",
        ),
        ("limits = 3", "setting 'limits' {wrong}: "),
        ("admin_key = ''", "setting 'admin_key' {wrong}: a key must not be empty"),
        ("admin_key = 'a'\n[[api_keys]]\nkey = 'a'", "admin_key must differ from every key in api_keys"),
        ("metrics_key = 'a'\n[[api_keys]]\nkey = 'a'", "metrics_key must differ from every key in api_keys"),
        ("port = ", "settings file {file} is not TOML: "),
        ("port = " + "1" * 5000, "settings file {file} is not TOML: "),
        ("state_dir = ''", "setting 'state_dir' {wrong}: a path must not be empty"),
        (
            r'engines_file = "a\u0000"',
            "setting 'engines_file' {wrong}: a path must not contain a NUL character",
        ),
    ],
)
def test_a_file_that_is_wrong_is_named(write, text, message):
    path = write(text)
    file = repr(str(path))
    assert refused(path).startswith(message.format(file=file, wrong=f"(in {file}) cannot be used"))


def test_a_mark_of_the_byte_order_is_no_part_of_a_file(tmp_path):
    path = tmp_path / "kvpin.toml"
    path.write_bytes(b"\xef\xbb\xbfport = 9003")
    assert load_settings(path).port == 9003


def test_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "kvpin.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refused(path)


def test_an_error_does_not_repeat_a_value_that_may_be_secret(write):
    path = write("[[api_keys]]\nkey = 'hush'\ntenant = 'not a tenant'\n")
    assert "hush" not in refused(path)


def test_a_setting_behind_a_table_belongs_above_the_first(write):
    """TOML takes such a line as a part of the table before it."""
    for text, named in (
        ("[limits]\nbody_bytes = 9\nreuse = true", "limits.reuse"),
        ("[[engines]]\nkind = 'vllm'\nurl = 'http://127.0.0.1:1'\nreuse = true", "engines[0].reuse"),
    ):
        said = refused(write(text))
        assert said.startswith(f"unknown setting {named!r} in ")
        assert said.endswith(": write reuse above the first [table] of the file")
