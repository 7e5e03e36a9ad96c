"""A kvpin of any version before the fake engines of the tests, and what one sees of it in each case.

kvpin's clocks are the comparison's (`clocked_kvpin.py`), so that durations, and all that is learned from
them, are the same in each run. Before and after each case, the world is at rest: no request runs, every
event of the engines has been read, and all threads of kvpin sleep.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.compare.cases import ADMIN, Case, cases
from tests.compare.doors import Doors, asked, joined, read_answer
from tests.compare.setups import SETUPS, Setup
from tests.compare.transcripts import Transcript
from tests.fake_engines.publisher import Publisher
from tests.fake_engines.text import words

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("clocked_kvpin.py")
START_S, REST_S, SETTLE_S, STOP_S = 300.0, 60.0, 1.0, 30.0
_LOOKS, _LOOK_S = 3, 0.002
_loading = asyncio.Lock()  # two threads must not import transformers at once
CASE_S = 1.0
"""Seconds by which kvpin's clocks move before each case."""


@dataclass(slots=True)
class World:
    """What a run needs of its kvpin.

    Attributes:
        port: of kvpin.
        doors: before its engines.
        clock: the file of its clocks.
        log: its log file.
        batches: engine → what publishes its KV events.
        heard: engine → batches of these events that kvpin had read when it was last asked.
    """

    port: int
    doors: Doors
    clock: Path
    log: Path
    batches: dict[str, Publisher]
    now: float = 0.0
    read: int = 0
    heard: dict[str, int] = field(default_factory=dict)

    def tick(self, seconds: float) -> None:
        """Moves kvpin's clocks."""
        self.now += seconds
        with self.clock.open("r+b") as file:
            file.write(struct.pack("d", self.now))

    async def told(self, path: str) -> Any:
        """What a GET of the admin API answers."""
        head = f"GET /admin/v1/{path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {ADMIN}\r\n\r\n"
        answer = await asked(self.port, head.encode(), b"")
        return json.loads(answer.partition(b"\r\n\r\n")[2])

    async def quiet(self) -> None:
        """Returns when all threads of kvpin sleep."""
        looks = 0
        while looks < _LOOKS:
            await asyncio.sleep(_LOOK_S)
            looks = looks + 1 if self.doors.is_read() else 0

    async def rest(self) -> None:
        """Returns when the world is at rest."""
        ends = time.monotonic() + REST_S
        while why := await self._unrest():
            if time.monotonic() > ends:
                raise SystemExit(f"the world does not come to rest: {why}\n{self.log.read_text()[-3000:]}")
            await asyncio.sleep(0.005)

    async def _unrest(self) -> str:
        """Why the world is not at rest; empty if it is."""
        await self.quiet()
        if self.doors.busy:
            return "engines answer"
        for engine in (await self.told("engines"))["engines"]:
            if engine["state"] not in {"ready", "draining"} or engine["in_flight"]:
                return f"{engine['id']} is {engine['state']}, {engine['in_flight']} in flight"
            relearns = engine["trust"] == "approximate" and engine["why"] != "reuse is off"
            if relearns and engine["id"] in self.batches:
                return f"{engine['id']} relearns its view: {engine['why']}"
        return await self.unread()

    async def unread(self) -> str:
        """Which events kvpin has not read; empty if it has read all."""
        published = {name: publisher.published for name, publisher in self.batches.items()}
        if published == self.heard:
            return ""
        for engine in (engine for pool in (await self.told("stats"))["pools"] for engine in pool["engines"]):
            if (name := engine["id"]) in published:
                events = engine["kv"].get("events", {"batches": 0})  # it has none while it connects anew
                self.heard[name] = events["batches"]
        return "" if published == self.heard else f"batches of events: {self.heard} of {published}"

    def new_log(self) -> list[str]:
        """Lines that were written since the last call."""
        with self.log.open("rb") as file:
            file.seek(self.read)
            text = file.read()
            self.read = file.tell()
        return text.decode(errors="replace").splitlines()


@asynccontextmanager
async def running_world(setup: Setup, checkout: Path, directory: Path) -> AsyncIterator[World]:
    """Starts engines and the kvpin of `checkout`; yields the world once it is at rest; ends all."""
    config, clock, log = directory / "kvpin.toml", directory / "clock", directory / "log"
    doors, publishers = Doors(), dict[str, Publisher]()
    config.write_text(setup.toml({engine.name: await doors.open(engine.name) for engine in setup.engines}))
    clock.write_bytes(bytes(8))
    with ExitStack() as stack:
        process = stack.enter_context(_process(checkout, clock, log, config))  # it begins while engines do
        doors.pid = process.pid
        async with _loading:
            await asyncio.to_thread(words)
        for engine in setup.engines:
            running = stack.enter_context(engine.start())
            doors.ports[engine.name] = int(running.url.rpartition(":")[2])
            if engine.kind == "vllm" and setup.follows_events:
                publishers[engine.name] = running.publisher
        ends = time.monotonic() + START_S
        while not (found := re.search(r"base_url +http\S+?:(\d+)/v1\n", log.read_text(errors="replace"))):
            if process.poll() is not None or time.monotonic() > ends:
                raise SystemExit(f"kvpin of {checkout} does not start:\n{log.read_text()}")
            await asyncio.sleep(0.05)
        world = World(int(found[1]), doors, clock, log, publishers)
        await _until_ready(world, setup)
        yield world
        process.terminate()
        process.wait(STOP_S)


async def _until_ready(world: World, setup: Setup) -> None:
    """Lets the engines join one after the other, so that their order is the same each time."""
    for engine in setup.engines:
        world.doors.closed.remove(engine.name)
        joined = f'"engine": "{engine.name}", "model"'
        while joined not in world.log.read_text():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
    size = -1
    while size != (size := world.log.stat().st_size) or not await _is_tokenised(world):
        await world.rest()
        await asyncio.sleep(SETTLE_S)
    world.new_log()


async def _is_tokenised(world: World) -> bool:
    """True if kvpin has loaded and checked all tokenizers."""
    details = [pool["tokenisation"]["detail"] for pool in (await world.told("stats"))["pools"]]
    return all("as the engine" in each or "unchecked" in each for each in details)


@contextmanager
def _process(checkout: Path, clock: Path, log: Path, config: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-P", str(PROGRAM), str(clock)]
    command += ["serve", "--port", "0", "--config", str(config)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVPIN_")}
    environment |= {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0", "TZ": "UTC"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=checkout
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def run(checkout: Path, directory: Path, only: str = "") -> Transcript:
    """Sends the cases of all worlds; those of a world one after the other. `only`: a pattern of names."""
    transcripts = await asyncio.gather(*(_run_all(name, checkout, directory, only) for name in SETUPS))
    return {name: parts for transcript in transcripts for name, parts in transcript.items()}


async def _run_all(name: str, checkout: Path, directory: Path, only: str) -> Transcript:
    wanted = [case for case in cases(name) if re.search(only, case.name)]
    if not wanted:
        return {}
    (directory / name).mkdir()
    async with running_world(SETUPS[name], checkout, directory / name) as world:
        found = {case.name: await _run(world, case) for case in wanted}
        calls = sorted({f"{engine} {_text(head)}{_text(body)}" for engine, head, body in world.doors.control})
        return {**found, f"{name} control calls": {"engines": "\n".join(calls)}}


async def _run(world: World, case: Case) -> dict[str, str]:
    world.tick(CASE_S + case.later)
    world.doors.begin(case.acts)
    tasks, late = [], 0
    for request in case.requests:
        sent = asyncio.Event()
        streams = await asyncio.open_connection("127.0.0.1", world.port, limit=1 << 24)
        tasks.append(asyncio.create_task(_asked(*streams, request, case.leaves, sent)))
        await sent.wait()
        if len(case.requests) > 1:
            await asyncio.sleep(0.005)
            await world.quiet()
            while await world.unread():  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.005)
            await world.quiet()
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0.002)
        if world.doors.n_held > late and case.leaves is None:
            await world.quiet()
            world.tick(case.takes)
            late += 1
            if not case.stuck:
                world.doors.let_go()
    await world.quiet()
    while world.doors.held:  # kvpin has not left, though its client has
        world.doors.let_go()
    await world.rest()
    answers = [task.result() for task in tasks]
    seen = {f"client {n}": _text(each) for n, each in enumerate(answers)}
    # Parts of one request are sent side by side: their order is chance, that of attempts is not.
    sent = sorted(world.doors.seen, key=lambda each: each[2])
    seen |= {f"engine {n}": f"{e}\n{_text(h)}{_text(b)}" for n, (e, h, b) in enumerate(sent)}
    ids = [each for answer in answers for each in re.findall(rb"\r\nx-request-id: (\S+)", answer)]
    for number, name in enumerate(ids):
        seen[f"record {number}"] = json.dumps(await world.told(f"requests/{name.decode()}"), indent=1)
    seen["log"] = "\n".join(sorted(world.new_log()))
    return seen


async def _asked(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    request: bytes,
    leaves: int | None,
    sent: asyncio.Event,
) -> bytes:
    """What a client gets on its connection. `sent` is set once it has asked."""
    try:
        head, gap, body = request.partition(b"\r\n\r\n")
        got = b""
        writer.write(head + gap)
        if b"100-continue" in head:
            got = await reader.readuntil(gap)  # the body is sent once kvpin asks for it
        writer.write(body)
        sent.set()
        if leaves is not None:
            got = await reader.readexactly(leaves) if leaves else b""
            await asyncio.sleep(0.01)
            return got
        async with asyncio.timeout(REST_S):
            return got + joined(await read_answer(reader, is_head=request.startswith(b"HEAD")))
    except (asyncio.IncompleteReadError, OSError) as error:
        return b"(no answer) " + getattr(error, "partial", b"")
    finally:
        sent.set()
        writer.close()


def _text(data: bytes) -> str:
    """Bytes as text; what is no UTF-8 is escaped."""
    return data.decode(errors="backslashreplace").replace("\r\n", "\n")
