"""The cost of KV events, from the frames of an engine's event socket to the index, and how they delay
requests.

The first tables take one core, without sockets. The last one is real ZMQ from another process: an event loop
follows it as `kvpin serve` does, while a ticker wakes every millisecond and notes how late it is; a request
would wait as long. On a busy machine it is late because of other processes: "own" is the part during which
the loop's thread worked, at most. Absolute figures depend on the machine.

    python benchmarks/ingest.py
    python benchmarks/ingest.py --only peer     beside ai-dynamo-runtime, which it installs
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import multiprocessing
import random
import subprocess
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import uvloop
import zmq
from core_speed import CACHE, PEER, answer, install

from engine_adapter.events.fields import read_sglang_keys, read_vllm_keys
from engine_adapter.events.subscriber import EventEndpoints, KvEventSubscriber
from engine_adapter.events.wire import EventReader
from engine_adapter.types import KvEvent
from proxy.core.index.blocks import namespace_root
from proxy.core.index.prefix_index import PrefixIndex
from proxy.core.index.view import EngineView, slices
from proxy.runtime import settle, steady

POOL = 16
VOCABULARY = 128_000
TICK_S = 0.001


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of an engine's events: block size, blocks per event, and events per batch."""

    name: str
    block: int
    per_event: int
    events_per_batch: int = 1


SHAPES = (
    Shape("32 tokens, one block an event", 32, 1),
    Shape("32 tokens, 16 blocks an event", 32, 16),
    Shape("32 tokens, 256 blocks an event", 32, 256),
    Shape("16 tokens, 64 blocks an event", 16, 64),
    Shape("pages of 1 token, 2,048 an event", 1, 2048),
    Shape("pages of 1 token, one an event, 64 events a batch", 1, 1, 64),
)


def stored(shape: Shape, seed: random.Random, blocks: int) -> Iterator[dict[str, object]]:
    """Chains of 2,048 tokens, in vLLM's form, as events of the shape."""
    chained = _chained(shape)
    parent: int | None = None
    for at in range(0, blocks, shape.per_event):
        if at % chained == 0:
            parent = None
        names = [seed.getrandbits(64) for _ in range(shape.per_event)]
        yield {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": parent,
            "token_ids": seed.choices(range(VOCABULARY), k=shape.block * shape.per_event),
            "block_size": shape.block,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * shape.per_event,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        parent = names[-1]


def _chained(shape: Shape) -> int:
    """Blocks of one chain."""
    return max(2048 // shape.block, shape.per_event)


def payloads(events: Iterable[dict[str, object]], per_batch: int) -> list[bytes]:
    """Batches of that many events."""
    batch: list[dict[str, object]] = []
    packed = []
    for event in events:
        batch.append(event)
        if len(batch) == per_batch:
            packed.append(msgspec.msgpack.encode([0.0, batch, 0]))
            batch = []
    return packed


def a_view() -> tuple[EngineView, PrefixIndex]:
    """An empty one, of engine `e`."""
    index = PrefixIndex()
    index.add_engine("e")

    def root_of(salt: str | None, lora: str | None) -> int:
        return namespace_root("m", lora=lora, salt=salt)

    return EngineView("e", index, root_of, POOL), index


# --- one core, without sockets ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one shape: CPU microseconds per block for each step, and bytes per block that stay."""

    shape: Shape
    decode: float
    store: float
    again: float
    remove: float
    memory: float


def measure(shape: Shape, blocks: int, repeats: int) -> Cost:
    """The best of some runs: other work on the machine only ever adds to one."""
    rounds = [_one_round(shape, blocks, seed) for seed in range(repeats)]
    decode, store, again, remove = (min(times) for times in zip(*rounds, strict=True))
    return Cost(shape, decode, store, again, remove, _memory(shape, blocks))


def _reader(shape: Shape) -> EventReader:
    return EventReader(read_sglang_keys if shape.block < POOL else read_vllm_keys)


def _batches(shape: Shape, blocks: int, seed: int) -> list[bytes]:
    events = stored(shape, random.Random(seed), blocks)  # noqa: S311 - not for secrets
    if shape.block < POOL:  # as SGLang has them
        events = ({**event, "extra_keys": None} for event in events)
    return payloads(events, shape.events_per_batch)


def _one_round(shape: Shape, blocks: int, seed: int) -> tuple[float, float, float, float]:
    """Microseconds a block to decode, store, store again and remove."""
    batches, reader = _batches(shape, blocks, seed), _reader(shape)
    view, index = a_view()
    events: list[KvEvent] = []

    def decode() -> None:
        for payload in batches:
            events.extend(reader.read(payload))

    def apply(these: Iterable[KvEvent]) -> None:
        for event in these:
            for part in slices(event):
                view.apply(part)

    taken = [_micros(decode) / blocks, _micros(lambda: apply(events)) / blocks]
    if not len(index) or reader.skipped or view.counts.stored != blocks:
        raise SystemExit("the events did not arrive in the index")
    taken.append(_micros(lambda: apply(events)) / blocks)
    names = [name for event in events for name in getattr(event, "hashes", ())]
    # vLLM tells of each eviction by itself, a chain's end first; SGLang of a node's pages together.
    together = 1 if shape.block >= POOL else 64
    removed = msgspec.msgpack.encode(
        [
            0.0,
            [
                {"type": "BlockRemoved", "block_hashes": names[at : at + together], "medium": "GPU"}
                for at in range(len(names) - together, -1, -together)
            ],
            0,
        ]
    )
    taken.append(_micros(lambda: apply(reader.read(removed))) / blocks)
    if len(index):
        raise SystemExit("the index is not empty")
    return taken[0], taken[1], taken[2], taken[3]


def _micros(work: Callable[[], None]) -> float:
    gc.collect()
    gc.disable()
    begun = time.process_time_ns()
    work()
    taken = (time.process_time_ns() - begun) / 1000
    gc.enable()
    return taken


def _memory(shape: Shape, blocks: int) -> float:
    """Bytes that view and index keep for a block."""
    batches, reader = _batches(shape, blocks, 0), _reader(shape)
    view, index = a_view()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for payload in batches:
        for event in reader.read(payload):
            view.apply(event)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    if not len(index):
        raise SystemExit("nothing was kept")
    return grown / blocks


# --- over sockets, beside requests -----------------------------------------------------------------


def publish(shape: Shape, rate: int, seconds: float, pipe: Connection) -> None:
    """Another process: publishes `rate` blocks a second and, once the engine is full, removes as many."""
    context = zmq.Context()
    pub, router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
    pub.setsockopt(zmq.SNDHWM, 100_000)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (pub, router)]
    seed = random.Random(1)  # noqa: S311 - not for secrets
    pipe.send(ports)
    client, _, _ = router.recv_multipart()  # nothing was published yet
    router.send_multipart((client, b"", b"", b"\xff" * 8, b""))
    pub.recv()
    per_batch = shape.per_event * shape.events_per_batch
    made = list(stored(shape, seed, int(rate * min(seconds, 2.0))))
    chunks = [made[at : at + shape.events_per_batch] for at in range(0, len(made), shape.events_per_batch)]
    added = [msgspec.msgpack.encode([0.0, chunk, 0]) for chunk in chunks]
    gone = [msgspec.msgpack.encode([0.0, [_removal(event) for event in chunk], 0]) for chunk in chunks]
    pipe.recv()
    begun, sequence = time.monotonic(), 0
    for at in range(int(rate * seconds / per_batch)):
        turn, which = divmod(at, len(chunks))
        pause = begun + at * per_batch / rate - time.monotonic()
        if pause > 0:
            time.sleep(pause)
        if turn:
            pub.send_multipart((b"", sequence.to_bytes(8, "big"), gone[which]))
            sequence += 1
        pub.send_multipart((b"", sequence.to_bytes(8, "big"), added[which]))
        sequence += 1
    pipe.send(sequence)
    pipe.recv()
    context.destroy(linger=0)


def _removal(event: dict[str, object]) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": event["block_hashes"], "medium": "GPU", "group_idx": 0}


@dataclass(frozen=True, slots=True)
class Beside:
    """The lateness of a ticker beside the ingest, in milliseconds: median, 99th percentile, worst.

    `own` is the part of the lateness that the loop's own work may explain. `cpu` is this process's, as a
    share of a core. `behind_s` is the time from the last batch sent to the last batch applied.
    """

    shape: Shape
    rate: int
    late: tuple[float, float, float]
    own: tuple[float, float, float]
    cpu: float
    behind_s: float


async def measure_beside(shape: Shape, rate: int, seconds: float) -> Beside:
    """Follows a process that publishes `rate` blocks a second, beside a ticker; rate 0: the ticker alone."""
    lateness: list[tuple[float, float]] = []
    ticking = asyncio.create_task(_tick(lateness))
    cpu, begun = time.process_time(), time.monotonic()
    behind = 0.0
    if rate:
        cpu, begun, behind = await _follow(shape, rate, seconds, lateness)
    else:
        await asyncio.sleep(seconds)
    used = (time.process_time() - cpu) / (time.monotonic() - begun)
    ticking.cancel()
    late, own = (_spread(times) for times in zip(*lateness, strict=True))
    return Beside(shape, rate, late, own, used, behind)


def _spread(times: Iterable[float]) -> tuple[float, float, float]:
    """Median, 99th percentile and maximum of seconds, in milliseconds."""
    ordered = sorted(times)
    return tuple(1000 * ordered[(len(ordered) - 1) * percent // 100] for percent in (50, 99, 100))  # type: ignore[return-value]


async def _follow(
    shape: Shape, rate: int, seconds: float, lateness: list[tuple[float, float]]
) -> tuple[float, float, float]:
    """CPU and wall clock when the flood began; seconds until its last batch was in, after it was sent."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=publish, args=(shape, rate, seconds, theirs)
    )
    process.start()
    events_port, replay_port = await asyncio.to_thread(ours.recv)
    endpoints = EventEndpoints(f"tcp://127.0.0.1:{events_port}", f"tcp://127.0.0.1:{replay_port}")
    subscriber = KvEventSubscriber(endpoints, read_keys=read_vllm_keys, idle_check_s=60)
    view, _ = a_view()
    task = asyncio.create_task(_apply_all(subscriber, view))
    await asyncio.sleep(3)  # the other process makes what it will send
    ours.send("go")
    lateness.clear()
    cpu, begun = time.process_time(), time.monotonic()
    total = await asyncio.to_thread(ours.recv)
    sent = time.monotonic()
    while subscriber.counts.batches < total:
        await asyncio.sleep(0.005)
        if task.done():
            await task
    behind = time.monotonic() - sent
    ours.send("done")
    task.cancel()
    await asyncio.to_thread(process.join)
    if subscriber.counts.gaps or view.counts.orphaned:
        raise SystemExit(f"events were lost: {subscriber.counts}")
    return cpu, begun, behind


async def _apply_all(subscriber: KvEventSubscriber, view: EngineView) -> None:
    """As `proxy/fleet/ingest.py` does."""
    turn_ends = 0.0
    async with aclosing(subscriber.events()) as events:
        async for event in events:
            for part in slices(event):
                view.apply(part)
                if time.monotonic() > turn_ends:
                    await asyncio.sleep(0)
                    turn_ends = time.monotonic() + 0.001


async def _tick(lateness: list[tuple[float, float]]) -> None:
    while True:
        due, cpu = time.monotonic() + TICK_S, time.thread_time()
        await asyncio.sleep(TICK_S)
        late = max(time.monotonic() - due, 0.0)
        lateness.append((late, min(late, time.thread_time() - cpu)))


# --- beside ai-dynamo-runtime ----------------------------------------------------------------------


async def cpu_of_kvpin(shape: Shape, blocks: int) -> float:
    """CPU microseconds a block, from an event socket to the index, sockets included. All are sent at once."""
    begun_cpu, _, _ = await _follow(shape, blocks * 1000, 0.001, [])
    return (time.process_time() - begun_cpu) * 1e6 / blocks


def cpu_of_dynamo(shape: Shape, blocks: int) -> float:
    """The same of Dynamo's selection service, which runs in a process of its own."""
    python = CACHE / "dynamo-1.6.1" / "bin" / "python"
    install(python)
    events = list(stored(shape, random.Random(1), blocks))  # noqa: S311 - not for secrets
    greeting = {**events[0], "block_hashes": list(range(1, shape.per_event + 1))}
    frames = payloads(events, shape.events_per_batch)
    last_chain = [event["token_ids"] for event in events[-(_chained(shape) // shape.per_event) :]]
    numbers = itertools.count()
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.set_hwm(0)
        endpoint = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        command = [str(python), str(Path(__file__).with_name("ingest_dynamo.py")), endpoint, str(shape.block)]
        peer = subprocess.Popen(
            command, env={"DYN_LOG": "off"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

        def send(payload: bytes) -> None:
            socket.send_multipart((b"", next(numbers).to_bytes(8, "big"), payload))

        def await_tokens(tokens: object) -> None:
            print(json.dumps(tokens), file=peer.stdin, flush=True)

        with peer, ThreadPoolExecutor(1) as pool:
            try:
                await_tokens(greeting["token_ids"])
                before = pool.submit(answer, peer)
                while not before.done():  # it connects when it likes
                    send(payloads([greeting], 1)[0])
                    time.sleep(0.05)
                for payload in frames:
                    send(payload)
                await_tokens(list(itertools.chain.from_iterable(last_chain)))
                after = answer(peer)
                return (json.loads(after)["cpu_s"] - json.loads(before.result())["cpu_s"]) * 1e6 / blocks
            finally:
                peer.kill()


# --- tables ----------------------------------------------------------------------------------------


def print_costs(costs: list[Cost]) -> None:
    """One row a shape."""
    print("\nOne core, without sockets; µs a block\n")
    print("| blocks | decode | store | in all | blocks/s | store again | remove | bytes a block |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for cost in costs:
        whole = cost.decode + cost.store
        print(
            f"| {cost.shape.name} | {cost.decode:.2f} | {cost.store:.2f} | {whole:.2f} | {1e6 / whole:,.0f} "
            f"| {cost.again:.2f} | {cost.remove:.2f} | {cost.memory:.0f} |"
        )


def print_beside(rows: list[Beside]) -> None:
    """One row a flood."""
    print("\nOver ZMQ from another process: how late a 1-ms ticker in the same event loop is\n")
    print("| flood | blocks/s | late: p50 / p99 / worst | own: p50 / p99 / worst | CPU | behind at the end |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        name = row.shape.name if row.rate else "none"
        late, own = (" / ".join(f"{value:.2f}" for value in times) for times in (row.late, row.own))
        print(
            f"| {name} | {row.rate:,} | {late} ms | {own} ms | {row.cpu:.0%} | {row.behind_s * 1000:.0f} ms |"
        )


def print_peer(blocks: int, repeats: int) -> None:
    """One row a shape; both take turns."""
    print(f"\nFrom an event socket to the index, sockets included: CPU µs a block, best of {repeats}\n")
    print(f"| blocks | kvpin | {PEER} |")
    print("|---|---:|---:|")
    for shape in SHAPES[:4]:
        kvpin, dynamo = [], []
        for _ in range(repeats):
            kvpin.append(uvloop.run(cpu_of_kvpin(shape, blocks)))
            dynamo.append(cpu_of_dynamo(shape, blocks))
        print(f"| {shape.name} | {min(kvpin):.1f} | {min(dynamo):.1f} |", flush=True)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, default=65_536, help="blocks of each shape (65,536)")
    parser.add_argument("--repeats", type=int, default=5, help="runs, the best of which counts (5)")
    parser.add_argument("--rate", type=int, default=50_000, help="blocks a second of the flood (50,000)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long it lasts (10)")
    parser.add_argument("--only", choices=("cost", "beside", "peer"), help="one part alone")
    options = parser.parse_args()
    if options.only == "peer":
        print_peer(options.blocks, options.repeats)
        return
    if options.only != "beside":
        print_costs([measure(shape, options.blocks, options.repeats) for shape in SHAPES])
    if options.only != "cost":
        floods = [(SHAPES[0], 0), (SHAPES[2], options.rate), (SHAPES[1], options.rate), (SHAPES[0], 10_000)]
        print_beside([uvloop.run(measure_beside(shape, rate, options.seconds)) for shape, rate in floods])


if __name__ == "__main__":
    with steady():  # as in `kvpin serve`
        settle()
        main()
