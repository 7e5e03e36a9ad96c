"""kvpin is stopped or killed, and the next one knows what the engines hold: no more and no less."""

from __future__ import annotations

import stat
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from tests.fake_engines.vllm import running_vllm
from tests.kv_world import safetensors_of
from tests.live.answers import until
from tests.live.conftest import running_kvpin
from tests.live.llama_world import llama_world

pytestmark = pytest.mark.live

DAY_S = 86_400
RAW = {"content-type": "application/octet-stream"}


def body_of(number, model):
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"{number} " * 60}],
        "max_tokens": 1,
        "temperature": 0,
    }


def ask(kvpin, number, model):
    """Tokens that were predicted, and reported, to be reused."""
    answer = kvpin.post("chat/completions", body_of(number, model))
    usage = answer.raise_for_status().json()["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return int(answer.headers["x-kvpin-predicted-tokens"]), details.get("cached_tokens", 0)


class World:
    """Two vLLMs with events, one without, and an embedded engine; and a kvpin before them with a state."""

    def __init__(self, stack, tmp_path, start_engine):
        self._tmp, self._starts = tmp_path, 0
        self.told = stack.enter_context(running_vllm())
        self.other = stack.enter_context(running_vllm(model="other"))
        self.silent = stack.enter_context(running_vllm(model="silent", kv_events=False))
        self.embedded = start_engine("--kv-blocks", "256")
        info = httpx.get(f"{self.embedded.url}/kv/info", trust_env=False).json()
        self.model, self.hidden = info["model"], info["hidden_size"]
        self.state = tmp_path / "state"

    @contextmanager
    def kvpin(self):
        self._starts += 1
        engines = {"told": self.told, "other": self.other, "silent": self.silent}
        flags = [f"--engine=vllm={each.url},id={name}" for name, each in engines.items()]
        flags.append(f"--engine=embedded={self.embedded.url},id=embedded")
        log = self._tmp / f"kvpin-{self._starts}.log"
        with running_kvpin(log, *flags, "--state-dir", str(self.state)) as kvpin:
            until(lambda: {engine["state"] for engine in kvpin.engines().values()} == {"ready"})
            until(lambda: [kvpin.engines()[name]["trust"] for name in ("told", "other")] == ["precise"] * 2)
            yield kvpin

    @property
    def files(self):
        return [path for path in self.state.rglob("*") if path.is_file()]


def test_what_was_known_counts_where_it_still_holds(tmp_path, start_engine):
    with ExitStack() as stack:
        world = World(stack, tmp_path, start_engine)
        embedded, messages = world.model, body_of(1, "")["messages"]
        with world.kvpin() as kvpin:
            for model in ("tiny", "silent", "other", embedded):
                assert ask(kvpin, 1, model)[0] == 0
            assert ask(kvpin, 2, "tiny") == (0, 0)
        # kvpin was stopped. The engine's old batches leave its buffer, and new ones come.
        world.told.publisher.forget(but=1)
        httpx.post(f"{world.told.url}/v1/chat/completions", json=body_of(3, "tiny"), trust_env=False)
        with world.kvpin() as kvpin:
            for number in (1, 3):
                predicted, reported = ask(kvpin, number, "tiny")
                assert predicted == reported > 0
            for model in ("silent", "other"):
                assert ask(kvpin, 1, model)[0] > 0
            predicted, reported = ask(kvpin, 1, embedded)
            assert predicted == reported > 0
            pinned = kvpin.admin(
                "POST", "pin", json={"messages": messages, "model": embedded, "ttl_s": DAY_S}
            )
            assert pinned.json()["state"] == "done", pinned.text
            (before,) = kvpin.admin("GET", "stats").json()["pins"]
            table = safetensors_of(hidden=world.hidden)
            kvpin.admin("POST", "prompt_tables?id=t", content=table, headers=RAW).raise_for_status()
            until(lambda: before["pin_id"].encode() in (world.state / "state").read_bytes())
            kvpin.kill()
        for engine in (world.silent, world.other):
            engine.fake.restart()
        assert {stat.S_IMODE(path.stat().st_mode) for path in world.files} == {0o600}
        with world.kvpin() as kvpin:
            (pin,) = kvpin.admin("GET", "stats").json()["pins"]
            assert 80_000 < pin.pop("expires_in_s") < before.pop("expires_in_s")
            assert pin == before
            (listed,) = kvpin.admin("GET", "prompt_tables").json()["prompt_tables"]
            assert listed["table_id"] == "t"
            unpinned = kvpin.admin("POST", "unpin", json={"pin_id": pin["pin_id"]})
            assert unpinned.json()["result"]["unpinned"]
            predicted, reported = ask(kvpin, 2, "tiny")
            assert predicted == reported > 0
            for model in ("silent", "other"):  # nothing of what was known of them holds
                assert ask(kvpin, 1, model) == (0, 0)


def test_files_and_pins_of_a_llama_server_outlive_a_kill(tmp_path):
    texts = [f"{number} of many words " * 30 for number in range(6)]
    state = tmp_path / "state"
    with llama_world(tmp_path, slots=2, ctx=1024, kvpin_flags=("--state-dir", str(state))) as world:
        for text in texts[:4]:  # all lie in files
            world.chat(text)
        world.admin("pin", {"messages": [{"role": "user", "content": texts[3]}], "ttl_s": DAY_S})
        until(lambda: b"pin-" in b"".join(path.read_bytes() for path in state.glob("state")))
        until(lambda: all(slot["saved"] == slot["tokens"] for slot in world.slots()))
        world.kvpin.kill()
        world.restart_kvpin()
        world.until_ready()
        (pin,) = world.kvpin.admin("GET", "stats").json()["pins"]
        for text in texts[4:]:
            world.chat(text)
        for text in (texts[3], texts[0]):
            answer = world.chat(text)
            usage = answer.json()["usage"]
            reported = usage["prompt_tokens_details"]["cached_tokens"]
            assert reported == int(answer.headers["x-kvpin-predicted-tokens"])
            assert reported == usage["prompt_tokens"] - 1
            until(lambda: [slot for slot in world.slots() if slot["pinned_s"] > 80_000])
        world.admin("unpin", {"pin_id": pin["pin_id"]})
        assert not [slot for slot in world.slots() if slot["pinned_s"]]
