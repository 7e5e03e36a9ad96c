import pytest

from engine_adapter import Role
from proxy.server.checks import check, check_reload, faults_here, managed_engines
from proxy.settings import EngineSettings, ManagedSettings, Settings, SettingsError
from scripts.make_gguf import gguf_path
from tests.llama import llama_server

ELSEWHERE = EngineSettings(kind="vllm", url="http://127.0.0.1:1", id="v")


def test_two_embedded_engines_when_none_is_named():
    told = [(engine.kind, engine.id) for engine in managed_engines(Settings())]
    assert told == [("embedded", "embedded-0"), ("embedded", "embedded-1")]


def test_what_a_llama_server_needs_is_there_before_it_starts(tmp_path):
    words = (llama_server(), "-m", str(gguf_path("tiny")), "--slot-save-path", str(tmp_path / "kv"))
    check(Settings(managed=(ManagedSettings(kind="llama_server", command=words),)))
    assert (tmp_path / "kv").is_dir()


def faults(**settings):
    return list(faults_here(Settings(engines=(ELSEWHERE,), **settings)))


def of_roles(*engines):
    made = [
        EngineSettings(kind="vllm", url=f"http://127.0.0.1:{n}", id=f"e{n}", model=model, role=role)
        for n, (model, role) in enumerate(engines, 1)
    ]
    return [*faults_here(Settings(engines=made))]


@pytest.mark.parametrize(
    ("engines", "whose"),
    [
        ([(None, "prefill")], "every engine"),
        ([("m", "prefill"), (None, "prefill")], "every engine"),
        ([("m", "prefill"), ("n", "decode")], "every engine of the model 'm'"),
        ([("m", "prefill"), ("m", "decode")], None),
        ([("m", "prefill"), (None, "both")], None),  # which model that one serves is not known yet
        ([(None, "prefill"), ("m", "decode")], None),
    ],
)
def test_a_model_that_nothing_could_decode_is_refused(engines, whose):
    said = f"{whose} has role=prefill: give one of them role=decode, or none a role"
    assert of_roles(*engines) == ([said] if whose else [])


def test_where_a_source_may_name_an_engine_that_decodes_none_is_missed():
    found = Settings(
        engines=[ELSEWHERE.model_copy(update={"role": Role.PREFILL})],
        discovery=[{"source": "dns://gpus.example:8000", "kind": "vllm"}],
    )
    assert [*faults_here(found)] == []


def test_every_fault_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "foo")
    file = tmp_path / "file"
    file.touch()
    found = faults(
        reuse=True,
        otel=True,
        managed=({"kind": "llama_server", "command": "/no/llama-server -m m.gguf"},),
        exchange={"url": f"unix:{file}/bus"},
        tls={"cert": "/no/cert.pem"},
        state_dir=file / "state",
        record_traffic=tmp_path / "none" / "traffic.jsonl",
    )
    for line, said in zip(
        found,
        (
            "engine 'llama_server-0': there is no program '/no/llama-server'",
            "exchange: ",
            "OTEL_EXPORTER_OTLP_ENDPOINT is 'foo': it must look like http://host:4318",
            "tls.cert: '/no/cert.pem' cannot be read",
            f"state_dir: '{file}/state' cannot be used: '{file}' is no directory",
            "record_traffic: ",
        ),
        strict=True,
    ):
        assert line.startswith(said), (line, said)


def test_a_place_that_takes_no_files_not_even_of_root():
    said = "cannot be used: '/proc' may not be written"
    assert faults(reuse=True, exchange={"url": "unix:/proc/x"}, state_dir="/proc/foo") == [
        f"exchange: '/proc/x' {said}",
        f"state_dir: '/proc/foo' {said}",
    ]


def test_what_could_not_be_made_or_may_be_read_by_others(tmp_path):
    assert faults(admin_key_file=tmp_path / "key") == []
    assert faults(admin_key_file=tmp_path / "none" / "key") == [
        f"admin_key_file: '{tmp_path}/none/key' cannot be written: No such file or directory"
    ]
    tmp_path.chmod(0o755)
    (fault,) = faults(reuse=True, exchange={"url": f"unix:{tmp_path}"})
    assert "closed to others (chmod 700)" in fault


LOCKED = {"api_keys": ({"key": "k"},), "admin_key": "a", "metrics_key": "m"}
FOUND = {"discovery": ({"source": "dns://engines:8000", "kind": "vllm"},)}
NONE_NAMED = "no engine is named any more: is the file complete?; restart kvpin to run without them"


@pytest.mark.parametrize(
    ("old", "new", "losses"),
    [
        ({"engines": (ELSEWHERE,)}, {}, [NONE_NAMED]),
        (FOUND, {}, [NONE_NAMED]),
        (LOCKED, {"admin_key": "b"}, ["api_keys is empty: anyone could", "metrics_key is gone: it"]),
        (LOCKED, {**LOCKED, "admin_key": None}, ["admin_key is gone: it protects the admin API"]),
    ],
)
def test_a_reload_that_loses_all_engines_or_a_lock_is_refused(old, new, losses):
    with pytest.raises(SettingsError) as refused:
        check_reload(Settings(**old), Settings(**new), has_issued=False)
    lines = str(refused.value).splitlines()
    assert all(map(str.startswith, lines, losses))
    assert len(lines) == len(losses)


def test_a_reload_may_change_engines_and_locks():
    check_reload(Settings(), Settings(), has_issued=False)
    check_reload(Settings(engines=(ELSEWHERE,), **LOCKED), Settings(**FOUND, **LOCKED), has_issued=False)
    check_reload(Settings(**LOCKED), Settings(**{**LOCKED, "api_keys": ()}), has_issued=True)
