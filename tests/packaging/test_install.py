"""kvpin as users install it, in front of an engine of the checkout."""

import os
import re
import subprocess
import sys
import threading
import venv
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("KVPIN_", "PYTHON"))}


def made_venv(path):
    venv.create(path, with_pip=True)
    return path / "bin"


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def by_pip(folder, package):
    programs = made_venv(folder / "venv")
    run(programs / "pip", "install", "--quiet", package, env=CLEAN)
    return programs / "kvpin"


def by_uv(folder, package):
    programs = made_venv(folder / "uv")
    run(programs / "pip", "install", "--quiet", "uv", env=CLEAN)
    env = {**CLEAN, "UV_TOOL_DIR": str(folder / "tools"), "UV_TOOL_BIN_DIR": str(folder / "bin")}
    run(programs / "uv", "tool", "install", "--python", sys.executable, package, env=env)
    return folder / "bin" / "kvpin"


def wheel(folder):
    return next(WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"]))


def sdist(folder):
    return next(SdistBuilder(str(ROOT)).build(directory=str(folder)))


@pytest.fixture(
    scope="module",
    params=[(wheel, by_pip), (sdist, by_pip), (wheel, by_uv)],
    ids=["wheel by pip", "sdist by pip", "wheel by uv tool"],
)
def program(request, tmp_path_factory):
    """The path of an installed `kvpin`."""
    make, install = request.param
    folder = tmp_path_factory.mktemp("installed")
    return install(folder, make(folder))


@contextmanager
def serving(program, folder, *flags):
    """Runs `kvpin serve` away from the checkout; yields its address once it is ready."""
    command = [program, "serve", "--port", "0", "--reuse", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder, env=CLEAN)
    timer = threading.Timer(120, process.kill)
    timer.start()
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready:"):
                yield re.search(r"base_url\s+(http://\S+)/v1", "".join(lines))[1]
                break
        else:
            pytest.fail("".join(lines))
    finally:
        timer.cancel()
        process.terminate()
        process.wait(60)
        process.stdout.close()


def test_it_tells_its_version_and_helps(program, tmp_path):
    assert re.fullmatch(r"kvpin \d+\.\d+\.\d+\n", run(program, "--version", cwd=tmp_path, env=CLEAN))
    listed = run(program, "--help", cwd=tmp_path, env=CLEAN).partition("Commands:")[2]
    commands = re.findall(r"^  (\w+) ", listed, re.MULTILINE)
    assert len(commands) > 10
    for command in commands:
        if command != "engine":  # needs torch
            assert "Example:" in run(program, command, "--help", cwd=tmp_path, env=CLEAN)


def test_it_serves_a_request_and_the_page(program, tmp_path, embedded_engine):
    with serving(program, tmp_path, "--engine", f"embedded={embedded_engine.url}") as url:
        body = {"model": "kvpin-tiny", "messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 2}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 2)
        for name in ("", "app.js", "vendor/uplot.js"):
            assert httpx.get(f"{url}/ui/{name}", trust_env=False).status_code == 200
        said = run(program, "stats", "--url", url, cwd=tmp_path, env=CLEAN)
        assert "1 of 1 engines ready" in said


def test_it_says_what_the_embedded_engine_needs(program, tmp_path):
    done = subprocess.run(
        [program, "serve", "--managed", "embedded"],
        capture_output=True, text=True, check=False, cwd=tmp_path, env=CLEAN,
    )  # fmt: skip
    assert done.returncode == 2
    assert "need torch: pip install 'kvpin[engine]'" in done.stderr
