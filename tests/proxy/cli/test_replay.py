import json
import sys
from pathlib import Path

import pytest

TRACES = Path(__file__).parents[2] / "data" / "traces"
AGENTS, CONVERSATION = (str(TRACES / f"{name}.jsonl.gz") for name in ("agents", "conversation"))


def test_a_table_of_policies(kvpin):
    words = ("--engines", "2,4", "--load", "0.9", "--policies", "kvpin,round-robin,oracle", "--jobs", "1")
    result = kvpin("replay", AGENTS, *words, "--gpu-tokens", "300k")
    assert result.exit_code == 0, result.output
    assert "agents.jsonl.gz: 200 requests, load 0.9; each engine 300,000 tokens on the GPU" in result.stdout
    lines = [line for line in result.stdout.splitlines() if line.startswith("│")]
    assert len(lines) == 6
    assert result.stderr == ""


def test_everything_that_can_be_said(kvpin, tmp_path):
    words = [
        "--engines",
        "3",
        "--gpu-tokens",
        "20GiB",
        "--host-tokens",
        "80GiB",
        "--bytes-per-token",
        "128KiB",
    ]
    words += [
        "--model",
        "chunked",
        "--prefill-rate",
        "10k",
        "--restore-rate",
        "150k",
        "--context-tokens",
        "100k",
    ]
    words += [
        "--chunk-tokens",
        "4096",
        "--decode-step-ms",
        "20",
        "--decode-stream-ms",
        "0.2",
        "--speedup",
        "5",
    ]
    words += ["--policies", "kvpin,chwbl", "--seeds", "0,1", "--limit", "100", "--jobs", "2"]
    paths = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "plot")}
    words += [word for kind, path in paths.items() for word in (f"--{kind}", str(path))]
    result = kvpin("replay", CONVERSATION, *words)
    assert result.exit_code == 0, result.output
    assert "for chwbl, the first block that not all requests share stands for one" in result.stdout
    document = json.loads(paths["json"].read_text())
    assert document["settings"]["model"]["gpu_tokens"] == 163_840
    assert [(run["policy"], run["seed"], run["requests"]) for run in document["runs"]] == [
        *(("kvpin", 0, 100), ("chwbl", 0, 100), ("kvpin", 1, 100), ("chwbl", 1, 100))
    ]
    assert len(paths["csv"].read_text().splitlines()) == 5
    assert paths["plot"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_the_standard_output_holds_nothing_else(kvpin, kind):
    result = kvpin("replay", AGENTS, "--limit", "20", "--policies", "kvpin", f"--{kind}", "-")
    assert result.exit_code == 0
    assert result.stdout.startswith({"json": "{", "csv": "policy,"}[kind])
    assert "│" not in result.stdout


def test_the_same_words_say_the_same(kvpin):
    words = (
        "replay",
        AGENTS,
        "--load",
        "0.9",
        "--policies",
        "kvpin,sglang,oracle",
        "--seeds",
        "3",
        "--jobs",
        "1",
        "--csv",
        "-",
    )
    assert kvpin(*words).stdout == kvpin(*words).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl: cannot be read: No such file or directory"),
        ([AGENTS, "--engines", "many"], "--engines: 'many' is no amount"),
        ([AGENTS, "--gpu-tokens", "1k"], "no request of the trace fits an engine: give it more GPU tokens"),
        ([AGENTS, "--policies", "best"], "--policies: there is no policy 'best'"),
        ([AGENTS, "--limit", "1", "--load", "1"], "all requests arrive at once"),
        (
            [AGENTS, "--limit", "1", "--csv", "/nowhere/x"],
            "/nowhere/x: cannot be written: there is no folder /nowhere",
        ),
    ],
)
def test_what_cannot_be_replayed(kvpin, words, message):
    result = kvpin("replay", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_file_that_cannot_be_written(kvpin, tmp_path):
    result = kvpin("replay", AGENTS, "--limit", "1", "--policies", "kvpin", "--csv", str(tmp_path))
    assert (result.exit_code, result.stderr) == (2, f"kvpin: {tmp_path}: cannot be written: Is a directory\n")


def test_a_plot_without_matplotlib_is_refused_before_the_work(kvpin, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = kvpin("replay", AGENTS, "--plot", str(tmp_path / "p.png"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "kvpin: --plot needs matplotlib: pip install 'kvpin[replay]'\n"
