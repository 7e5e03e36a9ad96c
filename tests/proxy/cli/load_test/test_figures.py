import pytest

from proxy.cli.load_test.figures import figures
from proxy.cli.load_test.sender import RequestSample


def test_the_words_of_vllm():
    samples = [
        RequestSample(
            ttft_s=0.1, gaps_s=[0.1, 0.1], latency_s=0.3, prompt_tokens=10, cached_tokens=4, output_tokens=3
        ),
        RequestSample(
            ttft_s=0.3, gaps_s=[0.2], latency_s=0.5, prompt_tokens=20, cached_tokens=0, output_tokens=5
        ),
        RequestSample(error="503"),
    ]
    found = figures(samples, 2.0)
    assert (found["completed"], found["failed"], found["duration"]) == (2, 1, 2.0)
    assert (found["total_input_tokens"], found["cached_input_tokens"], found["total_output_tokens"]) == (
        30,
        4,
        8,
    )
    assert (found["request_throughput"], found["output_throughput"]) == (1.0, 4.0)
    assert found["total_token_throughput"] == 19.0
    assert found["mean_ttft_ms"] == found["median_ttft_ms"] == pytest.approx(200)
    assert found["p99_ttft_ms"] == pytest.approx(298)  # numpy.percentile([100, 300], 99)
    assert found["mean_tpot_ms"] == pytest.approx((100 + 50) / 2)
    assert found["median_itl_ms"] == pytest.approx(100)
    assert found["mean_e2el_ms"] == pytest.approx(400)


def test_what_nobody_tells_is_unknown():
    found = figures([RequestSample(ttft_s=0.1, latency_s=0.1, output_tokens=1)], 1.0)
    assert (found["mean_tpot_ms"], found["p99_itl_ms"], found["cached_input_tokens"]) == (None, None, None)
    assert found["p99_ttft_ms"] == found["mean_ttft_ms"] == pytest.approx(100)
