import pytest

from tests.fake_engines.vllm import running_vllm


def test_an_engine_that_is_well(kvpin, embedded_engine):
    result = kvpin("doctor", embedded_engine.url, "--probe")
    assert result.exit_code == 0, result.output
    for text in ("embedded", "detected", "the view is current", "sent twice: the engine reports 48 of 49"):
        assert text in result.output
    assert "no findings" in result.output


def test_findings_come_with_what_mends_them(kvpin):
    with running_vllm(replay_endpoint=False, loras=("ada",)) as engine:
        result = kvpin("doctor", f"vllm={engine.url},id=v")
    assert result.exit_code == 1, result.output
    assert "LoRA ada" in result.output
    assert "detected" not in result.output
    assert '→ give --kv-events-config a "replay_endpoint"' in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["localhost:8000"], "kvpin: 'localhost:8000' is not an address: it needs http:// or https://"),
        (["http://127.0.0.1:9"], "kvpin: http://127.0.0.1:9: "),
        (["http://127.0.0.1:9", "--kind", "x"], "unknown engine kind 'x'"),
        (["vllm=http://127.0.0.1:9", "--kind", "vllm"], "leave out --kind: 'vllm=http://"),
        (["vllm=http://127.0.0.1:9,x=1"], "kvpin: vllm=…: unknown option 'x'"),
        (["http://127.0.0.1:9,events=tcp://x:1", "--events", "tcp://y:1"], "option 'events' is given twice"),
    ],
)
def test_what_cannot_be_examined(kvpin, words, message):
    result = kvpin("doctor", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_engine_that_wants_a_key_may_be_one_that_kvpin_started(kvpin):
    with running_vllm(api_key="k") as engine:
        result = kvpin("doctor", engine.url)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "it wants a key: give it as api_key=KEY" in result.stderr
    assert "if kvpin started it, `kvpin stats` tells of it" in result.stderr
