import json
from dataclasses import replace

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from proxy.cli.load_test import BenchError, RequestSample, figures, first_model, prompts_of, run
from proxy.cli.measure import BenchOptions
from tests.engines import served

LOAD = BenchOptions(
    model="m", num_prompts=2, num_prefixes=1, prefix_len=3, suffix_len=1, output_len=4, max_concurrency=2
)


@pytest.mark.live
async def test_a_stream_is_timed_and_its_usage_read(embedded_engine):
    done = []
    model = await first_model(f"{embedded_engine.url}/v1", None)
    samples, seconds = await run(
        f"{embedded_engine.url}/v1", replace(LOAD, model=model), "timed", lambda: done.append(1)
    )
    assert len(done) == len(samples) == 2
    for sample in samples:
        assert sample.error == ""
        assert sample.prompt_tokens > sample.output_tokens == 4
        assert sample.cached_tokens is not None
        assert 0 < sample.ttft_s < sample.latency_s < seconds
        assert sum(sample.gaps_s) == pytest.approx(sample.latency_s - sample.ttft_s)


def app(answer):
    async def chat(_request):
        return answer()

    async def models(_request):
        return JSONResponse({"data": []})

    routes = [Route("/v1/chat/completions", chat, methods=["POST"]), Route("/v1/models", models)]
    return Starlette(routes=routes)


def stream(*chunks):
    return StreamingResponse([f"data: {json.dumps(chunk)}\n\n" for chunk in chunks])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: JSONResponse({"error": {"message": "no room"}}, 503), "503 Service Unavailable: no room"),
        (lambda: PlainTextResponse("no", 404), "404 Not Found"),
        (lambda: PlainTextResponse("no", 401), "401 Unauthorized; --api-key gives a client's key"),
        (lambda: stream({"error": {"message": "gone"}}), "gone"),
        (lambda: stream({"choices": []}), "its answer has no text"),
        (lambda: stream({"text": 1}), "its answer is not a stream of chat completion chunks"),
    ],
)
async def test_a_server_that_cannot_be_measured(answer, said):
    with served(app(answer)) as url, pytest.raises(BenchError) as caught:
        await run(f"{url}/v1", LOAD, "", lambda: None)
    assert str(caught.value).startswith(f"{url}/v1: ")
    assert said in str(caught.value)


async def test_a_text_may_hold_line_separators():
    chunk = '{"choices": [{"delta": {"content": "a\u2028b\u0085c"}}]}'
    with served(app(lambda: StreamingResponse([f"data: {chunk}\r\n\r\ndata: [DONE]\r\n\r\n"]))) as url:
        samples, seconds = await run(f"{url}/v1", LOAD, "", lambda: None)
    assert [sample.error for sample in samples] == ["", ""]
    assert 0 < max(sample.latency_s for sample in samples) < seconds < 60


async def test_models_that_cannot_be_read():
    with served(app(lambda: None)) as url:
        with pytest.raises(BenchError, match="lists no model: name one with --model"):
            await first_model(f"{url}/v1", None)
        with pytest.raises(BenchError, match="404"):
            await first_model(f"{url}/other", None)
    with pytest.raises(BenchError, match="nothing answers at http://127"):
        await first_model("http://127.0.0.1:9/v1", None)
    with pytest.raises(BenchError, match="is not an address"):
        await first_model("localhost:9/v1", None)


def test_prompts_share_prefixes_and_have_their_own_ends():
    load = BenchOptions(num_prompts=12, num_prefixes=3, prefix_len=20, suffix_len=5, seed=1)
    prompts = prompts_of(load, "salt")
    prefixes = [prompt.partition("\n\n")[0] for prompt in prompts]
    assert len(set(prompts)) == 12
    assert sorted(map(prefixes.count, set(prefixes))) == [4, 4, 4]
    assert prompts == prompts_of(load, "salt")
    assert not set(prefixes) & {prompt.partition("\n\n")[0] for prompt in prompts_of(load, "other")}


def test_the_words_of_vllm():
    one = {"ttft_s": 0.1, "gaps_s": [0.1, 0.1], "latency_s": 0.3, "prompt_tokens": 10, "cached_tokens": 4}
    other = {"ttft_s": 0.3, "gaps_s": [0.2], "latency_s": 0.5, "prompt_tokens": 20, "cached_tokens": 0}
    samples = [RequestSample(**one, output_tokens=3), RequestSample(**other, output_tokens=5)]
    found = figures([*samples, RequestSample(error="503")], 2.0)
    counts = {"completed": 2, "failed": 1, "total_input_tokens": 30, "cached_input_tokens": 4}
    counts |= {"total_output_tokens": 8, "request_throughput": 1.0, "output_throughput": 4.0, "duration": 2.0}
    assert found.items() >= (counts | {"total_token_throughput": 19.0}).items()
    assert found["mean_ttft_ms"] == found["median_ttft_ms"] == pytest.approx(200)
    assert found["p99_ttft_ms"] == pytest.approx(298)  # numpy.percentile([100, 300], 99)
    assert found["mean_tpot_ms"] == pytest.approx((100 + 50) / 2)
    assert found["median_itl_ms"] == pytest.approx(100)
    assert found["mean_e2el_ms"] == pytest.approx(400)


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
