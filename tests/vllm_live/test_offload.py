"""A real vLLM that offloads KV to host memory in chunks of several blocks: only whole chunks come back."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from tests.vllm_live.vllm_world import BLOCK, VllmOptions, vllm_world

pytestmark = pytest.mark.live

CHUNK = 4  # blocks
BLOCKS = 40  # on the "GPU": a prompt of 1,024 tokens fits, two do not
CONNECTOR = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "OnCpu",
        "spec_module_path": "offload_on_cpu",
        "cpu_bytes_to_use": 64 << 20,
        "blocks_per_chunk": CHUNK,
        "self_describing_kv_events": True,
    },
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    options = VllmOptions(
        blocks=BLOCKS,
        flags=("--kv-transfer-config", json.dumps(CONNECTOR)),
        environment={"PYTHONPATH": str(Path(__file__).parent)},
    )
    with vllm_world(tmp_path_factory.mktemp("vllm"), options) as world:
        yield world


def ids(seed: int, tokens: int) -> list[int]:
    return [300 + (seed * 7919 + 31 * at) % 3600 for at in range(tokens)]


def ask(world, prompt: list[int]) -> tuple[int, int]:
    """Tokens that were predicted and reported as cached."""
    answer = world.post("completions", {"prompt": prompt, "max_tokens": 1})
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return int(answer.headers["x-kvpin-predicted-tokens"]), cached


def fill(world, seed: int) -> None:
    """Takes all blocks of the GPU: what was there lies in host memory alone."""
    for number in range(2):
        ask(world, ids(seed + number, 1000))


def test_part_of_a_chunk_is_computed_again(world, tell):
    seen = []
    for shared in range(1, 13):  # blocks
        known = ids(10 + shared, 13 * BLOCK)
        assert ask(world, known) == (0, 0)
        fill(world, 100 + 2 * shared)
        seen.append(ask(world, [*known[: shared * BLOCK], *ids(50 + shared, 40)]))
    tell(f"predicted/loaded: {', '.join(f'{predicted}/{cached}' for predicted, cached in seen)}")
    assert [cached for _, cached in seen] == [n // CHUNK * CHUNK * BLOCK for n in range(1, 13)]
    assert [each for each in seen if each[0] != each[1]] == []


def test_prompts_that_share_parts_of_chunks_under_eviction(world, tell):
    """On the GPU, below it, or both in part: stems of any length, chunks that share their first blocks."""
    random, seen = Random(7), []  # noqa: S311 - the same each time
    stems = [ids(200 + number, 20 * BLOCK) for number in range(4)]
    for number in range(120):
        stem = random.choice(stems)[: random.randrange(0, 20 * BLOCK)]
        seen.append(ask(world, [*stem, *ids(300 + number % 40, random.randrange(1, 8 * BLOCK))]))
    wrong = [each for each in seen if each[0] != each[1]]
    tell(f"{len(seen) - len(wrong)} of {len(seen)} exact; wrong: {wrong or 0}")
    assert sum(cached > 0 for _, cached in seen) > 40
    assert wrong == []


def test_a_flush_reaches_what_lies_below_the_gpu(world):
    known = ids(900, 8 * BLOCK + 1)
    ask(world, known)
    fill(world, 902)
    assert ask(world, known) == (8 * BLOCK, 8 * BLOCK)
    world.admin("flush", {"all": True})
    assert ask(world, known) == (0, 0)
