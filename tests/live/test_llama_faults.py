"""A llama-server that is killed in the midst of a save."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.live.answers import cached, user
from tests.live.llama_world import WAIT_S, LlamaWorld, llama_world

pytestmark = pytest.mark.live

KV_BYTES = 2048  # of the tiny model, per token


def story(name: str, tokens: int = 2000) -> str:
    """A prompt of at least so many tokens, unlike those of other names from its start on."""
    return f"{name} Ship " * (tokens // 5)


def files(world: LlamaWorld) -> set[str]:
    return {path.name for path in world.host_dir.glob("kvpin-*.bin")}


def stop_in_next_save(world: LlamaWorld, before: set[str]) -> Path:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        with os.scandir(world.host_dir) as entries:  # quicker than pathlib: a save takes milliseconds
            names = [entry.name for entry in entries]
        for name in names:
            if name.endswith(".bin") and name not in before:
                world.servers[0].process.send_signal(signal.SIGSTOP)
                return world.host_dir / name
    raise AssertionError("no save began")


def until_saved(world: LlamaWorld) -> None:
    world.until(lambda: all(slot["saved"] == slot["tokens"] for slot in world.until_idle()), "saved slots")


def stop_in_mid_save(world: LlamaWorld) -> tuple[str, Path]:
    """(a prompt, the half of its file); the server is stopped."""
    for number in range(25):  # on a busy machine, most saves are over before this process gets its turn
        with ThreadPoolExecutor() as pool:
            found = pool.submit(stop_in_next_save, world, files(world))
            tokens = world.chat(story(f"Ada {number}")).json()["usage"]["prompt_tokens"]
            half = found.result()
        if half.stat().st_size < tokens * KV_BYTES:
            return story(f"Ada {number}"), half
        world.servers[0].process.send_signal(signal.SIGCONT)
        until_saved(world)
    raise AssertionError("every save was over before the server could be stopped")


def waits(world: LlamaWorld) -> bool:
    page = httpx.get(f"{world.kvpin.url}/metrics", timeout=WAIT_S, trust_env=False).text
    return bool(re.search(r"^kvpin_queue_requests{.*} [1-9]", page, re.MULTILINE))


def test_a_server_killed_in_mid_save_leaves_nothing_behind(tmp_path):
    with llama_world(tmp_path, slots=1) as world, ThreadPoolExecutor() as pool:
        long, half = stop_in_mid_save(world)
        whole = {path.with_suffix(".bin").name for path in world.host_dir.glob("kvpin-*.json")}
        assert files(world) - whole == {half.name}
        body = {"messages": user(story("Ben")), "max_tokens": 1}
        waiting = pool.submit(world.post, "chat/completions", body)
        world.until(lambda: waits(world) or world.engine().get("in_flight"), "a request that waits")
        world.servers[0].kill()
        assert waiting.result().status_code in (502, 503)
        assert world.post("chat/completions", body).json()["error"]["type"] == "server_error"
        world.restart()
        world.until_known()
        assert files(world) == whole
        assert cached(world.chat(long)) < 16
        until_saved(world)
        world.chat(story("Cyd"))
        again = world.chat(long)
        assert cached(again) == again.json()["usage"]["prompt_tokens"] - 1
        assert world.kv()["counts"]["restores"] == 1
        assert half.name not in files(world)
        assert "Traceback" not in world.kvpin.log.read_text()
