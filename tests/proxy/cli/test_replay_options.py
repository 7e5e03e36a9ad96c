import json
import re
import subprocess
import sys
from math import nan
from pathlib import Path

import pytest

from proxy.cli.replay import ReplayOptions, parse_amount
from proxy.replay.figures import FigureSource
from proxy.replay.simulated_engine import EngineModel
from proxy.replay.trace import RecordedEngine

TRACES = Path(__file__).parents[2] / "data" / "traces"
AGENTS, CONVERSATION = (str(TRACES / f"{name}.jsonl.gz") for name in ("agents", "conversation"))


def test_engines_of_several_sizes(kvpin):
    words = ("--engines", "2", "--gpu-tokens", "100k,300k", "--policies", "oracle", "--limit", "50")
    lines = kvpin("replay", AGENTS, *words, "--csv", "-").stdout.splitlines()
    assert [line.split(",")[:3] for line in lines[1:]] == [
        ["oracle", "2", size] for size in ("100000", "300000")
    ]


def test_a_trace_too_short_to_compare_policies_says_so(kvpin, tmp_path):
    path = tmp_path / "runs.json"
    words = (
        "replay",
        AGENTS,
        "--policies",
        "kvpin,sticky",
        "--load",
        "0.9",
        "--jobs",
        "1",
        "--json",
        str(path),
    )
    reason = "too short to compare policies: 200 requests"
    title, first, *_ = kvpin(*words).stdout.splitlines()
    assert (title.startswith("agents.jsonl.gz: "), first.startswith(reason)) == (True, True)
    doubt, assumed = json.loads(path.read_text())["doubts"]
    assert assumed.startswith(
        "DEFAULTS, NOT YOUR ENGINES: 500,000 tokens on the GPU, prefill 20,000 tokens/s"
    )
    assert doubt.startswith(reason)


def test_the_number_of_engines_that_keeps_a_p99(kvpin, tmp_path):
    path = tmp_path / "runs.json"
    words = ("replay", CONVERSATION, "--target-p99", "20", "--prefill-rate", "15k", "--jobs", "1")
    stdout = kvpin(*words, "--json", str(path)).stdout
    assert "kvpin: plan 3 engines for a p99 TTFT of 20 s: it is " in stdout
    assert "3 engines are enough for the traffic as it is: 8.33 s, and 32.9 s with 2" in stdout
    assert "too short to rely on: 300 requests" in stdout
    (need,) = json.loads(path.read_text())["needs"]
    assert (need["engines"], need["target_p99_s"], need["margin"]) == (3, 20.0, 0.2)
    assert "kvpin: 2 engines are not enough" in kvpin(*words, "--max-engines", "2").stdout


@pytest.mark.parametrize("words", [(), ("--json", "-")])
def test_a_standard_output_that_is_full_is_told(words):
    command = [sys.executable, "-m", "proxy.cli", "replay", AGENTS, "--limit", "5", "--policies", "sticky"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*command, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "kvpin: the standard output: cannot be written: No space left on device\n"


def test_a_recording_of_several_models_is_replayed_by_name(kvpin, tmp_path):
    lines = [
        {"timestamp": n, "input_length": 70, "output_length": 1, "hash_ids": [n], "block_tokens": 64}
        | {"model": "ab"[n % 2], "engine": f"e{n % 4}", "status": 429 if n > 7 else 200}
        for n in range(10)
    ]
    path = tmp_path / "traffic.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"timest')
    refused = kvpin("replay", str(path), "--policies", "kvpin")
    assert refused.stderr == f"kvpin: {path}: holds requests of a and b; choose one: --model-name a\n"
    assert refused.exit_code == 2
    result = kvpin("replay", str(path), "--policies", "kvpin", "--model-name", "b")
    assert result.exit_code == 0, result.output
    assert "traffic.jsonl: 4 requests of 2 engines, " in result.stdout
    assert result.stdout.splitlines()[-2:] == [
        "2 requests got an error and were left out",
        "the last line of the trace is incomplete and was left out",
    ]


RECORDED = RecordedEngine("median", gpu_tokens=70_000, prefill=((1024.0, 0.5),), token_s=0.03)


def test_what_was_recorded_counts_where_nothing_is_given():
    (recorded,) = ReplayOptions().models(RECORDED)
    assert (recorded.gpu_tokens, recorded.prefill_tok_s, recorded.step_s) == (70_000, 2048.0, 0.03)
    (given,) = ReplayOptions(gpu_tokens="1k", prefill_rate="9k", decode_step_ms=20).models(RECORDED)
    assert (given.gpu_tokens, given.prefill_tok_s, given.step_s) == (1000, 9000, 0.02)
    assert given.prefill_s(0, 9000) == 1.0
    sources = ReplayOptions(gpu_tokens="1k").plan(RECORDED).sources
    assert (sources["gpu_tokens"], sources["prefill_rate"], sources["restore_rate"]) == (
        *(FigureSource.GIVEN, FigureSource.RECORDED, FigureSource.DEFAULT),
    )


def test_a_context_length_needs_a_rate_beside_recorded_times():
    with pytest.raises(ValueError, match="give --prefill-rate as well"):
        ReplayOptions(context_tokens="32k").models(RECORDED)
    (model,) = ReplayOptions(context_tokens="32k", prefill_rate="9k").models(RECORDED)
    assert (model.context_tokens, model.curve) == (32_000, ())


def test_all_of_an_engine():
    options = ReplayOptions(
        gpu_tokens="40GiB", host_tokens="2M", bytes_per_token="128KiB", model="chunked",
        prefill_rate="8k", restore_rate="90k", context_tokens="64k", chunk_tokens="8192",
        decode_step_ms=20, decode_stream_ms=0.5,
    )  # fmt: skip
    steps = {"chunked": True, "chunk_tokens": 8192, "step_s": 0.02, "stream_s": 0.0005}
    assert options.models() == (EngineModel(327_680, 2_000_000, 8000, 90_000, 64_000, **steps),)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_tokens": "9" * 400}, "--gpu-tokens: '999999999999'… is too large"),
        ({"decode_step_ms": nan}, "--decode-step-ms nan: must be a number, 0 or more"),
        ({"decode_step_ms": -1.0}, "--decode-step-ms -1: must be a number, 0 or more"),
    ],
)
def test_engines_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ReplayOptions(**options).models()


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("12", (12, False)),
        ("1.5M", (1_500_000, False)),
        ("64 GiB", (64 << 30, True)),
        ("128KiB", (128 << 10, True)),
        ("7B", (7, True)),
        ("1TB", (10**12, True)),
    ],
)
def test_amounts(text, amount):
    assert parse_amount(text) == amount
