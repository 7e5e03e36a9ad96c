"""A real llama-server in router mode: its models are served, their states told, their KV outlives swaps."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_adapter import EngineSpec
from proxy.cli.engine_check import examine
from scripts.make_gguf import gguf_path
from tests.live.answers import cached, until
from tests.live.conftest import Kvpin, running_kvpin
from tests.llama import RunningLlama, memory_dir, running_llama_router, running_llama_server

pytestmark = pytest.mark.live

MODELS = ("m0", "m1")
WAIT_S = 60.0
CHECKS_S = 3.0  # several of kvpin's health checks


@dataclass(slots=True)
class World:
    kvpin: Kvpin
    router: RunningLlama

    def chat(self, model: str, messages: list[dict[str, Any]]) -> httpx.Response:
        body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
        url = f"{self.kvpin.base_url}/chat/completions"
        return httpx.post(url, json=body, timeout=WAIT_S, trust_env=False)

    def states(self) -> dict[str, str]:
        health = httpx.get(f"{self.kvpin.url}/health/ready", timeout=WAIT_S, trust_env=False).json()
        return {engine.removeprefix("llama_server-0-"): state for engine, state in health["models"].items()}

    def own_states(self) -> dict[str, str]:
        return states_of(self.router)

    def until(self, model: str, state: str) -> None:
        until(lambda: self.states()[model] == state, f"{model} {state}", self.kvpin.log.read_text)


def states_of(router: RunningLlama) -> dict[str, str]:
    """The state of each model, as a router tells it."""
    answer = httpx.get(f"{router.url}/models", timeout=WAIT_S, trust_env=False).json()
    return {model["id"]: model["status"]["value"] for model in answer["data"]}


def models_in(tmp_path: Path) -> Path:
    """A directory of the models, and of one that is broken."""
    models = tmp_path / "models"
    models.mkdir()
    for seed, name in enumerate(MODELS):
        shutil.copy(gguf_path("tiny", seed), models / f"{name}.gguf")
    whole = gguf_path("tiny").read_bytes()
    (models / "broken.gguf").write_bytes(whole[: len(whole) // 2])
    return models


@contextmanager
def router_world(
    tmp_path: Path, *flags: str, options: str = "", saves: bool = True, is_told: bool = True
) -> Iterator[World]:
    """A world of a router that saves, whose directory kvpin is told."""
    with (
        memory_dir() as saved,
        running_llama_router(
            tmp_path / "router.log", models_in(tmp_path), *flags, save_dir=saved if saves else None
        ) as router,
        running_kvpin(
            tmp_path / "kvpin.log",
            f"--engine=llama_server={router.url}{f',host_cache_dir={saved}' if is_told else ''}{options}",
            tokenised=False,  # no model is loaded to be asked
        ) as kvpin,
    ):
        yield World(kvpin, router)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with router_world(tmp_path_factory.mktemp("router"), "--models-max", "1") as world:
        yield world


def begun(text: str) -> list[dict[str, Any]]:
    """A conversation of some hundred tokens."""
    return [{"role": "user", "content": " ".join(f"{text} {number}" for number in range(60))}]


def test_every_model_is_served_and_none_is_loaded_by_kvpin(world):
    listed = httpx.get(f"{world.kvpin.base_url}/models", timeout=WAIT_S, trust_env=False).json()["data"]
    assert {model["id"]: model["status"]["value"] for model in listed} == dict.fromkeys(
        ("broken", *MODELS), "unloaded"
    )
    time.sleep(CHECKS_S)
    assert set(world.own_states().values()) == {"unloaded"}
    assert world.states() == world.own_states()


def test_doctor_tells_the_states_and_loads_no_model(world):
    router = EngineSpec("", world.router.url, "x")
    found = asyncio.run(examine(router, probe=False)).as_json()
    assert (found["kind"], found["model"], found["findings"]) == ("llama_server", "", [])
    assert found["models"] == dict.fromkeys(("broken", *MODELS), "unloaded")
    assert found["unseen"] == "the models themselves were not looked at"
    model = EngineSpec("llama_server", world.router.url, "x", model="m0")
    found = asyncio.run(examine(model, probe=False)).as_json()
    assert "not asked: the model is unloaded" in found["tokenisation"]["detail"]
    assert found["unseen"].startswith(
        "the model is unloaded: its tokenizer and its process were not looked at"
    )
    for verb in ("flush", "pin"):  # its flags are right, and not known
        assert found["cannot"][verb].startswith("its flags are not known before its model is first in memory")
    assert found["cannot"]["offload"].startswith("its flags are not known")
    assert set(world.own_states().values()) == {"unloaded"}


def test_a_probe_of_doctor_loads_the_model_by_its_requests(tmp_path):
    """No kvpin follows the router: it would try out the model once it is loaded, between the requests."""
    with running_llama_router(tmp_path / "log", models_in(tmp_path), "--models-max", "1") as router:
        model = EngineSpec("llama_server", router.url, "x", model="m0")
        assert states_of(router)["m0"] == "unloaded"
        found = asyncio.run(examine(model, probe=True)).as_json()
        assert states_of(router)["m0"] == "loaded"
    assert found["probe"]["error"] is None
    assert found["probe"]["reported"] == found["probe"]["predicted"] > 0
    assert found["tokenisation"]["ok"]


def test_conversations_outlive_swaps_and_predictions_are_exact(world):
    talks = {(model, name): begun(name) for name in ("river", "stone") for model in MODELS}
    for turn in range(3):
        for (model, name), messages in talks.items():
            answer = world.chat(model, messages)
            assert answer.status_code == 200, answer.text
            reused = cached(answer)
            if turn:
                assert reused > answer.json()["usage"]["prompt_tokens"] / 2
            assert world.own_states()[model] == "loaded"
            said = answer.json()["choices"][0]["message"]
            messages += [said, {"role": "user", "content": f"{name} {turn}"}]


def test_the_question_that_loads_a_model_is_known_also_with_its_own_prompt_cache(tmp_path):
    """The next question with the same document goes to its slot. Before, it went to another one."""
    with router_world(tmp_path, "--models-max", "1", "--cache-ram", "64") as world:
        (document,) = begun("river")
        answers = [
            world.chat("m0", [{**document, "content": f"{document['content']} {question}"}])
            for question in ("what?", "who?", "where?")
        ]
        usages = [answer.json()["usage"]["prompt_tokens_details"] for answer in answers]
        assert [usage["cached_tokens"] > 250 for usage in usages] == [False, True, True]


def test_the_directory_of_a_router_on_this_machine_is_found(tmp_path):
    flags = ("--models-max", "1", "--cache-reuse", "64")
    with router_world(tmp_path, *flags, is_told=False) as world:
        assert all(not engine["findings"] for engine in world.kvpin.engines().values())
        messages = begun("stone")
        for model in (*MODELS, "m0"):
            answer = world.chat(model, messages)
        assert cached(answer) > 200
        (finding,) = world.kvpin.engines()["llama_server-0-m0"]["findings"]
        assert finding.startswith("--cache-reuse has no effect")


def test_a_router_that_does_not_save_is_told_at_start(tmp_path):
    with router_world(tmp_path, "--models-max", "1", saves=False, is_told=False) as world:
        for engine in world.kvpin.engines().values():
            (finding,) = engine["findings"]
            assert finding == (
                "nothing is saved: whenever the router ends this model, all its KV is lost; start the router "
                "with --slot-save-path DIR, an absolute path, best in memory"
            )
        assert set(world.own_states().values()) == {"unloaded"}


def test_a_model_that_fails_to_load_is_an_error_of_its_own_and_puts_out_no_other(world):
    answer = world.chat("broken", begun("light"))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (424, "model_failed")
    assert "its llama-server ended with status 1" in error["message"]
    world.until("broken", "failed")
    assert world.chat("m1", begun("light")).status_code == 200
    until(lambda: world.kvpin.engines()["llama_server-0-broken"]["state"] == "suspect", "a suspect engine")
    assert world.kvpin.engines()["llama_server-0-broken"]["findings"] == [error["message"]]
    found = asyncio.run(examine(EngineSpec("", world.router.url, "x"), probe=False)).as_json()
    assert (found["models"]["broken"], len(found["findings"])) == ("failed", 1)
    assert world.chat("broken", begun("light")).json()["error"] == error
    assert world.own_states()["m1"] == "loaded", "it was put out for a model that cannot load"


def test_a_model_may_be_loaded_ahead_by_the_routers_own_route(world):
    world.chat("m0", begun("music")).raise_for_status()
    load = f"{world.kvpin.url}/models/load"
    answer = httpx.post(load, json={"model": "m1"}, timeout=WAIT_S, trust_env=False)
    assert answer.json() == {"success": True}
    world.until("m1", "loaded")
    assert world.states()["m0"] == "unloaded"


def test_a_model_is_not_loaded_where_the_router_does_not(tmp_path):
    with router_world(tmp_path, "--no-models-autoload") as world:
        answer = world.chat("m0", begun("window"))
        assert answer.status_code == 400
        assert "not loaded" in answer.json()["error"]["message"]


def test_a_plain_server_in_the_place_of_a_router_is_one_engine_with_its_own_model(tmp_path):
    def served() -> list[str]:
        listed = httpx.get(f"{world.kvpin.base_url}/models", timeout=WAIT_S, trust_env=False).json()
        return [model["id"] for model in listed["data"]]

    with router_world(tmp_path) as world:
        assert world.chat("m0", begun("a")).status_code == 200  # m1 was never in memory
        world.router.stop()
        flags = "--alias", "plain"
        with running_llama_server(tmp_path / "plain.log", None, *flags, slots=2, port=world.router.port):
            until(lambda: served() == ["plain"], "one model", world.kvpin.log.read_text)
            assert world.chat("plain", begun("a")).status_code == 200
            assert list(world.kvpin.engines()) == ["llama_server-0"]
        with running_llama_router(tmp_path / "again.log", world.router.model, port=world.router.port):
            until(lambda: {*MODELS} <= {*served()}, "its models again", world.kvpin.log.read_text)


def sleeps(server: RunningLlama) -> bool:
    return httpx.get(f"{server.url}/props", timeout=WAIT_S, trust_env=False).json()["is_sleeping"]


def test_kvpin_lets_a_server_sleep(tmp_path):
    with (
        memory_dir() as saved,
        running_llama_server(
            tmp_path / "llama.log", None, "--sleep-idle-seconds", "1", slots=2, save_dir=saved
        ) as server,
    ):
        engine = f"--engine=llama_server={server.url},host_cache_dir={saved},model=tiny"
        with running_kvpin(tmp_path / "kvpin-1.log", engine, tokenised=False) as kvpin:
            world, messages = World(kvpin, server), begun("letter")
            for _ in range(3):
                answer = world.chat("tiny", messages)
                cached(answer)  # as predicted
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
                until(lambda: sleeps(server))
                time.sleep(CHECKS_S)
                assert sleeps(server)
                assert world.kvpin.engines()["llama_server-0"]["model_state"] == "sleeping"
        # A kvpin that starts while the server sleeps does not wake it either.
        with running_kvpin(tmp_path / "kvpin-2.log", engine, tokenised=False) as kvpin:
            time.sleep(CHECKS_S)
            # Nor does a question that the server answers in its sleep.
            told = httpx.get(f"{kvpin.url}/props", timeout=WAIT_S, trust_env=False)
            assert told.json()["is_sleeping"]
            assert sleeps(server)
            answer = World(kvpin, server).chat("tiny", messages)
            assert answer.status_code == 200
            cached(answer)  # as predicted
