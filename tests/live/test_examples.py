"""Every example runs and shows what its docstring says."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from scripts.make_gguf import gguf_path
from tests.fakes import serving
from tests.live.conftest import ENGINE, running_kvpin
from tests.llama import llama_server, memory_dir

pytestmark = pytest.mark.live

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name, *options):
    command = [sys.executable, str(EXAMPLES / name), *options]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


NAMES = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "shared.py")


def test_every_example_is_run_here():
    source = Path(__file__).read_text()
    assert [name for name in NAMES if f'run("{name}"' not in source] == []


def failed(name, url):
    """What an example writes to standard error when it fails."""
    command = [sys.executable, str(EXAMPLES / name), "--base-url", f"{url}/v1"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_without_a_server_an_example_says_so_in_one_line(name):
    assert failed(name, "http://127.0.0.1:1").startswith("Nothing answers at http://127.0.0.1:1/")


async def test_where_no_model_is_served_it_says_so():
    async def models(_request):
        return JSONResponse({"object": "list", "data": []})

    async with serving(Starlette(routes=[Route("/v1/models", models)])) as url:
        said = await asyncio.to_thread(failed, "openai_chat.py", url)
    assert said.startswith("No model is served yet")


@pytest.mark.parametrize(
    ("name", "variable"), [("openai_chat.py", "OPENAI_API_KEY"), ("p_tuning.py", "KVPIN_ADMIN_KEY")]
)
async def test_a_key_may_come_from_the_environment_and_a_refusal_is_one_line(monkeypatch, name, variable):
    async def refuse(request):
        return JSONResponse({"error": {"message": f"got {request.headers['authorization']}"}}, 401)

    monkeypatch.setenv(variable, "mine")
    routes = [Route("/{path:path}", refuse, methods=["GET", "POST"])]
    async with serving(Starlette(routes=routes)) as url:
        said = await asyncio.to_thread(failed, name, url)
    assert said.endswith("answered 401: got Bearer mine\n")


def test_openai_chat(kvpin):
    counts = re.findall(r"of them cached (\d+)", run("openai_chat.py", "--base-url", kvpin.base_url))
    assert counts[0] == "0"
    assert int(counts[1]) > 0


def test_ttft_demo(kvpin):
    shown = run("ttft_demo.py", "--base-url", kvpin.base_url, "--seed", "5")
    (first, of_first), (second, _), (repeated, of_repeated) = re.findall(
        r"(\d+) of (\d+) prompt tokens", shown
    )
    assert int(of_first) >= 2000
    assert int(first) < 32 < int(second)
    assert int(repeated) >= int(of_repeated) - 16
    assert "faster" in shown


def test_prompt_order(kvpin):
    shown = run("prompt_order.py", "--base-url", kvpin.base_url)
    found = {
        name: int(cached) / int(of) for name, cached, of in re.findall(r"(.*): (\d+) of (\d+) tokens", shown)
    }
    good = ("document, then question", "time last", "same tools", "messages appended")
    assert found.pop("6 questions at once") > 0.6  # each of two idle engines computes the document once
    assert min(found.pop(name) for name in good) > 0.8
    assert max(found.values()) < 0.2


def test_p_tuning(kvpin):
    shown = run("p_tuning.py", "--base-url", f"{kvpin.url}/v1")
    assert re.findall(r"cached +(\d+) of", shown) == ["0", "0", "32"]


def test_offload_restore(kvpin):
    shown = run("offload_restore.py", "--base-url", f"{kvpin.url}/v1")
    assert shown.endswith("same answer\n")
    moved = re.findall(r"(?:offload|restore) +embedded-\d: (\d+) blocks", shown)
    assert moved[0] == moved[1] != "0"


def test_two_tenants(tmp_path):
    keys = ("--api-key", "alice-key", "--api-key", "bob-key")
    with running_kvpin(tmp_path / "log", "--managed", ENGINE, *keys) as kvpin:
        shown = run("two_tenants.py", "--base-url", kvpin.base_url)
        assert "one tenant" not in shown
        assert "alice-key" not in kvpin.log.read_text()
    counts = [int(count) for count in re.findall(r"(\d+) of \d+ prompt tokens", shown)]
    assert counts[0] == counts[2] == 0
    assert min(counts[1], counts[3]) > 300


def test_many_talks(tmp_path):
    talks, slots = 3, 2
    with memory_dir() as directory:
        command = f"{llama_server()} -m {gguf_path('tiny')} -np {slots} -c {slots * 4096} -t 1"
        engine = f"llama-server: {command} --slot-save-path {directory}"
        with running_kvpin(tmp_path / "log", "--engine", engine) as kvpin:
            shown = run("many_talks.py", "--base-url", kvpin.base_url, "--talks", str(talks), "--rounds", "2")
    counts = [(int(a), int(b)) for a, b in re.findall(r"(\d+) of (\d+) prompt tokens", shown)]
    assert len(counts) == 2 * talks
    for cached, total in counts[:talks]:
        assert cached < 100 < total
    # A prompt of the second round is the first round's prompt, its answer, and a few words.
    for (_, before), (cached, _) in zip(counts[:talks], counts[talks:], strict=True):
        assert cached >= before - 1
