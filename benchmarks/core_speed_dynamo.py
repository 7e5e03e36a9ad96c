"""The side of `core_speed.py` that runs in the environment of ai-dynamo-runtime.

Fills Dynamo's radix tree directly, and its selection service as engines do, with KV events over ZMQ; then
answers each line on its standard input with one line: medians in microseconds over all prompts, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from array import array

import msgspec
import zmq
from core_world import IN_FLIGHT, TOKENS_PER_BLOCK, WORLDS, World
from dynamo._core import RadixTree, SelectionService, compute_block_hash_for_seq

LOOK_S = 0.05


def hashes_of(tokens: list[int]) -> list[int]:
    """Dynamo's hashes of the blocks of a prompt."""
    hashes: list[int] = compute_block_hash_for_seq(tokens, TOKENS_PER_BLOCK)
    return hashes


class Service:
    """Dynamo's selection service, and an event socket for each of its workers."""

    def __init__(self) -> None:
        self.selection = SelectionService()
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._numbers: list[int] = []

    async def add_worker(self, world: World) -> None:
        """One more; returns once it gets events."""
        socket = self._context.socket(zmq.PUB)
        socket.set_hwm(0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        worker = len(self._sockets)
        self._sockets.append(socket)
        self._numbers.append(0)
        await self.selection.upsert_worker(
            {
                "worker_id": worker,
                "endpoint": f"http://127.0.0.1:{port}",
                "kv_events_endpoint": f"tcp://127.0.0.1:{port}",
                "block_size": TOKENS_PER_BLOCK,
                "total_kv_blocks": world.engine_tokens // TOKENS_PER_BLOCK,
                "max_num_batched_tokens": 8192,
            }
        )
        greeting = [worker] * TOKENS_PER_BLOCK
        while not await self._holds(worker, greeting):
            self.store(worker, greeting, hashes_of(greeting))
            await asyncio.sleep(LOOK_S)

    def store(self, worker: int, tokens: list[int], names: list[int]) -> None:
        """Tells that a worker holds a prompt, as vLLM does."""
        event = ["BlockStored", names, None, tokens, TOKENS_PER_BLOCK, None, "GPU"]
        payload = msgspec.msgpack.encode([time.time(), [event], 0])
        number = self._numbers[worker].to_bytes(8, "big")
        self._numbers[worker] += 1
        self._sockets[worker].send_multipart([b"", number, payload])

    async def has(self, worker: int, tokens: list[int]) -> None:
        """Returns once the worker is known to hold the prompt."""
        while not await self._holds(worker, tokens):
            await asyncio.sleep(LOOK_S)

    async def _holds(self, worker: int, tokens: list[int]) -> bool:
        scores = await self.selection.overlap_scores({"token_ids": tokens})
        blocks = {each["worker_id"]: each["device_blocks"] for each in scores["workers"]}
        return bool(blocks[worker] == len(tokens) // TOKENS_PER_BLOCK)


def store(tree: RadixTree, worker: int, hashes: list[int]) -> None:
    """The same for the tree. Contents are random: a block's own hash is a name that no other has."""
    blocks = [{"block_hash": each, "tokens_hash": each, "mm_extra_info": None} for each in hashes]
    data = {"stored": {"parent_hash": None, "blocks": blocks}}
    tree.apply_event(worker, json.dumps({"event_id": 0, "data": data, "dp_rank": 0}).encode())


async def fill(world: World, tree: RadixTree, service: Service) -> None:
    """Lets both know what the engines hold, and have requests in flight."""
    for _ in range(world.engines):
        await service.add_worker(world)
    last: dict[int, array[int]] = {}
    for engine, tokens in world.held():
        ids = tokens.tolist()
        names = hashes_of(ids)
        store(tree, engine, names)
        service.store(engine, ids, names)
        last[engine] = tokens
    for engine, tokens in last.items():
        await service.has(engine, tokens.tolist())
    for at in range(IN_FLIGHT * world.engines):
        request = {"token_ids": world.request(at).tolist(), "selection_id": str(at)}
        await service.selection.select_and_reserve(request)


async def measure(prompts: list[list[int]], tree: RadixTree, service: Service) -> dict[str, float]:
    """Medians over the prompts, in microseconds."""
    times: dict[str, list[float]] = {"hash": [], "match": [], "select": []}
    for prompt in prompts:
        begun = time.perf_counter()
        hashes = hashes_of(prompt)
        hashed = time.perf_counter()
        tree.find_matches(hashes)
        matched = time.perf_counter()
        await service.selection.select({"token_ids": prompt})
        selected = time.perf_counter()
        for name, seconds in zip(times, (hashed - begun, matched - hashed, selected - matched), strict=True):
            times[name].append(1e6 * seconds)
    return {name: statistics.median(each) for name, each in times.items()}


async def main(world: World) -> None:
    """Fills both, checks that they agree, and measures when asked."""
    tree, service = RadixTree(), Service()
    await fill(world, tree, service)
    prompts = [world.prompt(at).tolist() for at in range(world.prompts)]
    for at, prompt in enumerate(prompts):
        scores = tree.find_matches(hashes_of(prompt)).scores
        found = {worker: blocks for (worker, _), blocks in scores.items()}
        if any(found[engine] != tokens // TOKENS_PER_BLOCK for engine, tokens in world.holders(at)):
            raise RuntimeError(f"prompt {at} is not held as it should be: {found}")
    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        print(json.dumps(await measure(prompts, tree, service)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(WORLDS[sys.argv[1]]))
