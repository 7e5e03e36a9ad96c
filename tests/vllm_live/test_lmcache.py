"""LMCache as host tier: two real vLLMs over one LMCache, used only through kvpin."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from tests.live.answers import until
from tests.live.server_world import MODEL
from tests.vllm_live.lmcache_world import CHUNK, LmCacheWorld, lmcache_world
from tests.vllm_live.vllm_world import LORA

N_TOKENS = 700
WHOLE = N_TOKENS // CHUNK * CHUNK
MOVES = {"offload", "restore", "pin"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LmCacheWorld]:
    with lmcache_world(tmp_path_factory.mktemp("lmcache"), servers=2) as world:
        yield world


@dataclass(frozen=True, slots=True)
class Answer:
    """One request through kvpin; counts in tokens, time in seconds."""

    engine: str
    token_ids: list[int]
    predicted: int
    reported: int
    first_byte_s: float


@pytest.fixture
def ask(world: LmCacheWorld):
    """Asks kvpin for a completion of token ids; the prediction must be exact."""

    def ask(
        token_ids: list[int],
        *,
        model: str = MODEL,
        salt: str | None = None,
        exact: bool = True,
        max_tokens: int = 8,
    ) -> Answer:
        request_id = f"lmcache-{random.getrandbits(64):x}"
        body = {"model": model, "prompt": token_ids, "return_token_ids": True, "max_tokens": max_tokens}
        if salt is not None:
            body["cache_salt"] = salt
        response = world.vllms.post("completions", body, headers={"x-request-id": request_id})
        record = world.vllms.record(request_id)
        answer = Answer(
            response.headers["x-kvpin-engine"],
            response.json()["choices"][0]["token_ids"],
            record["predicted_tokens"],
            record["reported_tokens"],
            record["first_byte_s"],
        )
        assert answer.predicted == answer.reported or not exact, answer
        return answer

    return ask


_seeds = iter(range(1, 1000))


@pytest.fixture
def prompt() -> list[int]:
    """New token ids."""
    dice = random.Random(next(_seeds))  # noqa: S311 - not for secrets
    return [dice.randrange(100, 4000) for _ in range(N_TOKENS)]


def blocks(operation: dict) -> list[int]:
    return [part["done"] for part in operation["engines"]]


def test_offload_reset_restore_and_the_same_answer(world: LmCacheWorld, ask, prompt, tell):
    cold = ask(prompt, salt="mine")
    assert cold.reported == 0
    target = {"token_ids": prompt, "engine": cold.engine, "cache_salt": "mine"}
    assert blocks(world.vllms.admin("offload", target)) == [WHOLE // 32]
    world.until_tiers(prompt, "l2", "mine")
    world.reset_vllms()
    restored = world.vllms.admin("restore", target)
    assert blocks(restored) == [WHOLE // 32]
    assert restored["engines"][0]["bytes"] > 0
    world.until_tiers(prompt, "l1+l2", "mine")
    again = ask(prompt, salt="mine")
    assert again.reported == WHOLE
    assert again.token_ids == cold.token_ids
    # No other request reuses any of it.
    assert ask(prompt, salt="yours").reported == 0
    assert ask(prompt).reported == 0
    tell(f"cold {cold.reported} of {N_TOKENS} cached; after offload, reset and restore {again.reported}")


def test_what_lies_on_disk_alone_is_a_hit_too(world: LmCacheWorld, ask, prompt):
    cold = ask(prompt)
    world.vllms.admin("offload", {"token_ids": prompt})
    world.until_tiers(prompt, "l2")
    world.reset_vllms()
    again = ask(prompt)
    assert (again.reported, again.token_ids) == (WHOLE, cold.token_ids)


@pytest.mark.parametrize("n_tokens", [64, 65, 127, 128, 640, 641, 672, 673])
def test_predictions_hold_at_every_edge(world: LmCacheWorld, ask, prompt, n_tokens: int):
    prompt = prompt[:n_tokens]
    cold = ask(prompt)
    world.until_tiers(prompt, "l1+l2")
    # On the GPU: whole blocks of 32 but that of the last token. From LMCache: whole chunks, less that token.
    below = min(n_tokens // CHUNK * CHUNK, n_tokens - 1)
    assert ask(prompt).reported == max((n_tokens - 1) // 32 * 32, below)
    world.reset_vllms()
    again = ask(prompt)
    assert again.reported == below
    assert again.token_ids == cold.token_ids


def test_a_longer_prompt_takes_what_each_tier_has(world: LmCacheWorld, ask, prompt):
    first = ask(prompt[:300])
    world.until_tiers(prompt[:300], "l1+l2")
    world.reset_vllms()
    assert ask(prompt[:150]).reported == 128  # and is on a GPU now, up to 128 or 150
    assert ask(prompt).reported == 256
    assert first.reported == 0


def test_computed_on_one_engine_is_a_hit_on_the_other(world: LmCacheWorld, ask, prompt):
    first = ask(prompt)
    world.until_tiers(prompt, "l1+l2")
    drained = world.vllms.kvpin.admin("POST", f"engines/{first.engine}/drain").raise_for_status()
    assert drained.json()["state"] == "draining"
    try:
        second = ask(prompt)
    finally:
        world.vllms.kvpin.admin("POST", f"engines/{first.engine}/drain", json={"undo": True})
    assert second.engine != first.engine
    assert (second.reported, second.token_ids) == (WHOLE, first.token_ids)


def test_predictions_hold_while_gpus_evict(world: LmCacheWorld, ask, tell):
    """Sends more prompts than the GPUs can hold, some with a common prefix, one at a time."""
    dice = random.Random(5)  # noqa: S311 - not for secrets
    shared = [dice.randrange(100, 4000) for _ in range(330)]
    own = [[dice.randrange(100, 4000) for _ in range(dice.randrange(200, 600))] for _ in range(14)]
    prompts = [shared + part if at % 2 else part for at, part in enumerate(own)]
    answers = [
        ask(dice.choice(prompts), salt=dice.choice((None, "mine")), exact=False, max_tokens=2)
        for _ in range(80)
    ]
    exact = sum(answer.predicted == answer.reported for answer in answers)
    reused = sum(answer.reported for answer in answers)
    tell(f"{exact} of {len(answers)} exact, {reused} tokens reused")
    assert not [answer for answer in answers if answer.predicted > answer.reported]
    # What was stored within the last moment may not be told yet.
    assert exact >= len(answers) - 2


def test_lora_adapters_are_kept_apart(world: LmCacheWorld, ask, prompt):
    """LMCache itself mixes up their KV."""
    cold = {model: ask(prompt, model=model) for model in (MODEL, LORA)}
    assert [answer.reported for answer in cold.values()] == [0, 0]
    assert cold[MODEL].token_ids != cold[LORA].token_ids
    world.until_tiers(prompt, "l1+l2")
    world.reset_vllms()
    for model, answer in cold.items():
        again = ask(prompt, model=model)
        assert (again.reported, again.token_ids) == (WHOLE, answer.token_ids)


def test_a_pin_holds_until_it_is_taken_back(world: LmCacheWorld, ask, prompt):
    engine = ask(prompt).engine

    def pinned() -> int:
        answer = httpx.get(f"{world.coordinator_url}/cache/pins", trust_env=False)
        return answer.raise_for_status().json()["total"]

    target = {"token_ids": prompt, "engine": engine}
    made = world.vllms.admin("pin", {**target, "ttl_s": 600})
    assert made["result"]["blocks"] == WHOLE // 32
    assert pinned() == WHOLE // CHUNK
    world.vllms.admin("unpin", {"pin_id": made["result"]["pin_id"]})
    assert pinned() == 0
    short = world.vllms.admin("pin", {**target, "ttl_s": 0.5})
    assert short["result"]["blocks"] == WHOLE // 32
    until(lambda: pinned() == 0, "the end of the pin")


def test_a_flush_means_gone(world: LmCacheWorld, ask, prompt):
    for salt in (None, "mine"):
        ask(prompt, salt=salt)
    world.vllms.admin("offload", {"token_ids": prompt, "cache_salt": "mine"})
    world.vllms.admin("flush", {"all": True})
    assert list((world.tmp_path / "l2").rglob("*.data")) == []
    for salt in (None, "mine"):
        assert ask(prompt, salt=salt).reported == 0


def test_the_node_is_killed_and_comes_back(world: LmCacheWorld, ask, prompt, tell):
    cold = ask(prompt)
    world.until_tiers(prompt, "l1+l2")
    world.reset_vllms()

    def has_moves(expected: set[str]) -> bool:
        return all(
            MOVES & set(world.vllms.engine(number)["capabilities"]) == expected
            for number in range(len(world.vllms.servers))
        )

    def said() -> list[str]:
        lines = world.vllms.kvpin.log.read_text().splitlines()
        events = [json.loads(line) for line in lines if line.startswith("{")]
        return [f"{event['engine']}: {event['finding']}" for event in events if "finding" in event]

    before = said()
    world.kill("node")
    started = time.monotonic()
    # What is not known of it yet cannot be predicted; that the answer is right can be demanded.
    assert ask(prompt, exact=False).token_ids == cold.token_ids
    tell(f"the first answer after the node was killed took {time.monotonic() - started:.1f} s")
    until(lambda: has_moves(set()), "the end of its operations")
    other = ask(prompt[::-1])
    assert other.reported == 0
    refused = world.vllms.kvpin.admin("POST", "offload", json={"token_ids": prompt, "engine": other.engine})
    assert refused.status_code == httpx.codes.NOT_IMPLEMENTED
    assert world.url in refused.text
    new = said()[len(before) :]
    assert len(new) == len(world.vllms.servers)
    assert all(f"the LMCache server {world.url} is not reachable" in line for line in new)
    tell(*new)
    world.start("node")
    until(lambda: has_moves(MOVES), "its operations")

    def is_used() -> bool:
        ask(fresh := [*prompt[1:], 7], exact=False)
        return all(world.tiers(fresh))

    until(is_used, "use of the node")
    world.reset_vllms()
    again = ask(prompt, exact=False)
    assert (again.reported, again.token_ids) == (WHOLE, cold.token_ids)
