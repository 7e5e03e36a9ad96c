"""kvpin records what it serves, and replays it: a real proxy, a real engine, the file, the simulator."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from proxy.replay.trace import read_trace
from tests.live.answers import until
from tests.live.conftest import ENGINE, running_kvpin

pytestmark = pytest.mark.live

SYSTEM = "You keep the lighthouse of Wolkenstein. " + " ".join(f"Rule {n}: watch the sea." for n in range(40))
QUESTIONS = ("Which ship passed?", "Who lit the lamp?", "What does rule 7 say?")
KEYS = {"key-of-anna": 3, "key-of-bert": 1}
SECRETS = (
    "lighthouse",
    "wolkenstein",
    "rule",
    "watch",
    "sea",
    "ship",
    "lamp",
    "anna",
    "bert",
    "key-",
    "night",
)


def ask(kvpin, key, question, **fields):
    body = {
        "model": "kvpin-tiny",
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        "prompt_cache_key": "night-shift",
        "max_tokens": 5,
        "ignore_eos": True,
        "temperature": 0,
        **fields,
    }
    headers = {"authorization": f"Bearer {key}"}
    return kvpin.post("chat/completions", body, headers=headers).raise_for_status()


def all_lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines_of(path):
    """Those of requests."""
    return [line for line in all_lines_of(path) if "recording" not in line]


def test_what_was_served_can_be_replayed_and_not_read(tmp_path):
    path = tmp_path / "traffic.jsonl"
    flags = ["--managed", ENGINE, "--record-traffic", str(path)]
    flags += [word for key in KEYS for word in ("--api-key", key)]
    with running_kvpin(tmp_path / "log", *flags) as kvpin:
        usages = [
            ask(kvpin, key, question).json()["usage"]
            for key, asked in KEYS.items()
            for question in QUESTIONS[:asked]
        ]
        until(lambda: len(lines_of(path)) >= len(usages))
        ask(kvpin, "key-of-anna", QUESTIONS[0], stream=True)  # the last write is that of the shutdown
    *whole, streamed = lines_of(path)

    for line, usage in zip(whole, usages, strict=True):
        assert (line["input_length"], line["output_length"]) == (usage["prompt_tokens"], 5)
        assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert (line["engine"], line["status"], line["model"]) == ("embedded-0", 200, "kvpin-tiny")
    assert len({line["session_id"] for line in whole}) == len(KEYS)  # of one name, and two tenants
    assert streamed["counted"]
    assert 5 <= streamed["output_length"] <= 9
    assert streamed["ttft_ms"] > 0

    *_, about = (line["recording"] for line in all_lines_of(path) if "recording" in line)
    (engine,) = about["engines"]
    assert (engine["id"], engine["gpu_tokens"]) == ("embedded-0", 512 * 16)
    trace = read_trace(path)
    assert trace.figures.gpu_tokens == 512 * 16
    requests = trace.requests
    anna, bert = requests[0].chain.hashes, requests[3].chain.hashes
    assert len(anna) > 3
    assert all(request.chain.hashes[:-1] == anna[:-1] for request in requests[:3])
    assert requests[4].chain.hashes == anna
    assert not set(anna) & set(bert)

    text = path.read_text().lower()
    assert [secret for secret in SECRETS if secret in text] == []
    lists = [value for line in lines_of(path) for value in line.values() if isinstance(value, list)]
    assert len(lists) == len(requests)
    assert min(map(min, lists)) > 1 << 32  # hashes of 64 bits; no token's id is that large

    command = [sys.executable, "-m", "proxy.cli", "replay", str(path), "--engines", "1,2", "--jobs", "1"]
    done = subprocess.run([*command, "--json", "-"], capture_output=True, check=True, text=True)
    replayed = json.loads(done.stdout)
    assert replayed["settings"]["requests"] == len(requests)
    assert {run["policy"] for run in replayed["runs"]} >= {"kvpin", "round-robin", "oracle"}

    command = [sys.executable, "-m", "proxy.cli", "advise", str(path), "--json"]
    advice = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert (advice["requests"], advice["alone"]) == (len(requests), 0)
