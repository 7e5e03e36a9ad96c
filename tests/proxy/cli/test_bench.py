import pytest

pytestmark = pytest.mark.live
SMALL = ("--num-prompts", "6", "--num-prefixes", "2", "--prefix-len", "60", "--output-len", "4")


def test_two_addresses_side_by_side(kvpin, live_proxy, embedded_engine):
    result = kvpin("bench", live_proxy, f"{embedded_engine.url}/v1", *SMALL)
    assert result.exit_code == 0, result.output
    lines = {line[:32].strip(): line[32:].split() for line in result.stdout.splitlines()}
    assert lines["Successful requests"] == ["6", "6"]
    assert lines["Failed requests"] == ["0", "0"]
    assert lines["Total generated tokens"] == ["24", "24"]
    for name in ("Mean TTFT (ms)", "Median TPOT (ms)", "P99 ITL (ms)", "Mean E2EL (ms)"):
        assert all(float(value) > 0 for value in lines[name])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["http://127.0.0.1:9", "http://127.0.0.1:9/v1"], "an address is given twice"),
        (["127.0.0.1:9"], "is not an address"),
        (["http://127.0.0.1:9", "--request-rate", "0"], "--request-rate must be above 0"),
    ],
)
def test_bad_input_is_one_sentence(kvpin, words, said):
    result = kvpin("bench", *words)
    assert (result.exit_code, result.stdout) == (1, "")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
