from tests.fake_engines.vllm import running_vllm


def test_findings_come_with_what_mends_them(kvpin):
    with running_vllm(replay_endpoint=False, loras=("ada",)) as engine:
        result = kvpin("doctor", f"vllm={engine.url},id=v")
    assert result.exit_code == 1, result.output
    assert "LoRA ada" in result.output
    assert "detected" not in result.output
    assert '→ give --kv-events-config a "replay_endpoint"' in result.output


def test_an_engine_that_wants_a_key_may_be_one_that_kvpin_started(kvpin):
    with running_vllm(api_key="k") as engine:
        result = kvpin("doctor", engine.url)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "it wants a key: give it as api_key=KEY" in result.stderr
    assert "if kvpin started it, `kvpin stats` tells of it" in result.stderr
