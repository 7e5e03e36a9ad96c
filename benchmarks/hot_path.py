"""CPU time of kvpin itself: for each step of the prompt path, for a request and for a streamed chunk.

Steps run in this process, one chat after the other, each chat new to all caches. Requests run through a real
`kvpin serve` in its own process, with an engine that answers at once with fixed bytes; its CPU time is the
kernel's count. Absolute figures depend on the machine; compare ratios within one run.

    python benchmarks/hot_path.py
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from harness import kvpin
from large_tokenizer import DEFAULT_MODEL, large_tokenizer, sources
from tokenizers import Tokenizer

from engine_adapter import Capability, EngineInfo, EngineSpec, JsonBody, make_adapter
from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.types import Tier
from proxy.core.placement.scores import place
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.fleet.pool import Pool
from proxy.prompt import PromptBuilder, RegisteredTables
from tests.fakes import use_unchecked

CHAT = "/v1/chat/completions"
LARGE_VOCABULARY = 50_000


class Chats:
    """Chats of given lengths that share nothing but a language."""

    def __init__(self, tokenizer: ChatTokenizer, seed: int = 1) -> None:
        self._random = random.Random(seed)  # noqa: S311 - not for secrets
        self._lines = [line for text in sources() for line in text.splitlines() if len(line) > 8]
        sample = "\n".join(self._some(2000))
        self._tokens_per_line = len(tokenizer.encode(sample, add_special_tokens=False)) / 2000

    def body(self, tokens: int, **fields: object) -> bytes:
        """A request body whose prompt has about `tokens` tokens, in turns of up to 500."""
        turns = max(tokens // 500, 1) | 1
        per_turn = max(round(tokens / turns / self._tokens_per_line), 1)
        messages = [
            {"role": ("user", "assistant")[turn % 2], "content": "\n".join(self._some(per_turn))}
            for turn in range(turns)
        ]
        return msgspec.json.encode({"model": "m", "messages": messages, "max_tokens": 1, **fields})

    def _some(self, lines: int) -> list[str]:
        return self._random.choices(self._lines, k=lines)


# --- the steps -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Steps:
    """Median CPU microseconds of each step."""

    tokens: int
    micros: dict[str, float]


def measure_steps(source: Path, sizes: tuple[int, ...], repeats: int) -> list[Steps]:
    """The steps for one tokenizer."""
    info = EngineInfo("m", "i", frozenset[Capability](), tokens_per_block=16, gpu_blocks=100_000)
    tokenizer = ChatTokenizer.load(str(source))
    builder = PromptBuilder(info, tables=RegisteredTables(max_bytes=1))
    builder.adopt(tokenizer)
    use_unchecked(builder)
    pool = _pool(info)
    chats = Chats(tokenizer)
    plain = Tokenizer.from_file(str(source / "tokenizer.json"))
    results = []
    for size in sizes:
        taken: dict[str, list[float]] = {}
        lengths = [
            _one_chat(tokenizer, plain, builder, pool, chats.body(size), taken) for _ in range(repeats)
        ]
        medians = {step: statistics.median(times) for step, times in taken.items()}
        results.append(Steps(round(statistics.median(lengths)), medians))
    return results


def _one_chat(
    tokenizer: ChatTokenizer,
    plain: Tokenizer,
    builder: PromptBuilder,
    pool: Pool,
    raw: bytes,
    taken: dict[str, list[float]],
) -> int:
    """Takes one chat through every step; returns its length in tokens."""

    def timed(step: str, work: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever the step gives
        begun = time.process_time_ns()
        result = work()
        taken.setdefault(step, []).append((time.process_time_ns() - begun) / 1000)
        return result

    body = timed("parse", lambda: JsonBody(raw))
    messages = timed("decode", lambda: body.get("messages"))
    text = timed("render", lambda: tokenizer.render(messages))
    ids = timed("encode", lambda: tokenizer.encode(text, add_special_tokens=False))
    timed("encode again", lambda: tokenizer.encode(text, add_special_tokens=False))
    timed("tokenizers", lambda: plain.encode_batch_fast([text], add_special_tokens=False)[0].ids)
    prompt = asyncio.run(builder.build(CHAT, body, salt=None))
    if prompt is None or prompt.token_ids != ids:
        raise SystemExit("the prompt path disagrees with itself")
    chain = timed("chain", lambda: pool.chain(prompt))
    for engine in pool.engines:
        pool.index.store(engine, Tier.GPU, chain.hashes)
    timed("match", lambda: pool.index.match(chain.hashes))
    timed("match + place", lambda: place(pool.candidates(chain), chain))
    timed("lease", lambda: pool.index.add_pending("engine-0", chain.hashes))
    timed("release", lambda: pool.index.end_pending("engine-0", chain.hashes))
    for engine in pool.engines:
        pool.index.wipe(engine)
    return len(ids)


def _pool(info: EngineInfo, engines: int = 4) -> Pool:
    fleet = Fleet()
    for number in range(engines):
        spec = EngineSpec("openai_compatible", "http://127.0.0.1:1", f"engine-{number}")
        engine = fleet.add(make_adapter(spec))
        pool = fleet.join(engine, replace(info, instance=str(number)))
        engine.state = EngineState.READY
    return pool


# --- requests through kvpin ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """Cost of requests of one kind: kvpin's CPU time and the time they take, in microseconds each."""

    name: str
    direct: float
    through: float
    cpu: float


class InstantEngine(asyncio.Protocol):
    """Answers every request at once with fixed bytes; a stream's chunks come one by one."""

    chunks = 1
    pause_s = 0.002
    _PLAIN = (
        b'{"choices":[{"message":{"role":"assistant","content":"hi"}}],'
        b'"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":0}}}'
    )
    _DELTA = b'data: {"choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'

    def __init__(self) -> None:
        self._waiting = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._waiting += data
        head, end, rest = self._waiting.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", head.lower())
        if not end or len(rest) < (int(length[1]) if length else 0):
            return
        self._waiting = b""
        if head.startswith(b"GET"):
            self._json(b'{"status":"ok","data":[{"id":"m"}]}')
        elif b'"stream":true' in rest:
            self._transport.write(  # type: ignore[attr-defined]  # a socket's
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            self._chunk(self.chunks)
        else:
            self._json(self._PLAIN)

    def _json(self, content: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % len(content) + content)  # type: ignore[attr-defined]  # likewise

    def _chunk(self, left: int) -> None:
        data = self._DELTA if left else b"data: [DONE]\n\n"
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))  # type: ignore[attr-defined]  # likewise
        if left:
            asyncio.get_running_loop().call_later(self.pause_s, self._chunk, left - 1)
        else:
            self._transport.write(b"0\r\n\r\n")  # type: ignore[attr-defined]  # likewise


def cpu_s(pid: int) -> float:
    """CPU seconds a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def drive(port: int, bodies: Iterator[bytes], clients: int) -> float:
    """Sends every body from `clients` clients; returns microseconds of wall time per request and client."""
    taken: list[float] = []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for body in bodies:
            begun = time.perf_counter()
            head = (
                "POST {} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
            )
            writer.write(head.format(CHAT, len(body)).encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: *(\d+)", answer.lower())
            if not answer.startswith(b"HTTP/1.1 200"):
                raise SystemExit(answer.decode())
            await (reader.readexactly(int(length[1])) if length else reader.readuntil(b"\r\n0\r\n\r\n"))
            taken.append(time.perf_counter() - begun)
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return statistics.median(taken) * 1e6


@asynccontextmanager
async def instant_engine() -> AsyncIterator[int]:
    """An InstantEngine on a port of its own."""
    server = await asyncio.get_running_loop().create_server(InstantEngine, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def measure_requests(source: Path, requests: int, chunks: int, *, reuse: bool) -> list[Load]:
    """The loads, through one kvpin."""
    chats = Chats(ChatTokenizer.load(str(source)))
    plan: list[tuple[str, int, int, dict[str, object]]] = [
        (f"{size} tokens", size, 0, {}) for size in (200, 2000, 8000)
    ]
    plan.append((f"stream of {chunks} chunks", 200, chunks, {"stream": True}))
    loads = []
    async with instant_engine() as engine_port:
        options = ["--engine", f"openai_compatible=http://127.0.0.1:{engine_port},tokenizer={source}"]
        running = kvpin(*options, reuse=reuse)
        url = await asyncio.to_thread(running.__enter__)
        try:
            port = int(url.rpartition(":")[2])
            pid = listener_of(port)
            for name, size, streamed, fields in plan:
                InstantEngine.chunks = streamed
                count = max(requests // 20, 8) if streamed else requests
                bodies = [chats.body(size, **fields) for _ in range(count + 20)]
                await drive(port, iter(bodies[:20]), 1)
                before = cpu_s(pid)
                through = await drive(port, iter(bodies[20:]), 4)
                used = cpu_s(pid) - before
                direct = await drive(engine_port, iter(bodies[20:]), 4)
                loads.append(Load(name, direct, through, used * 1e6 / count))
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)
    return loads


def listener_of(port: int) -> int:
    """The process that was started with `--port PORT`."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0")
        if str(port).encode() in words and b"serve" in words:
            return int(path.parent.name)
    raise SystemExit("kvpin's process is not to be found")


# --- tables ----------------------------------------------------------------------------------------


def print_steps(name: str, results: list[Steps]) -> None:
    """One row a step, one column a length; the last two rows compare encoders."""
    print(f"\nCPU of each step, µs ({name})\n")
    print("| step | " + " | ".join(f"{steps.tokens} tokens" for steps in results) + " |")
    print("|---|" + "---:|" * len(results))
    for step in (
        "parse",
        "decode",
        "render",
        "encode",
        "encode again",
        "chain",
        "match",
        "match + place",
        "lease",
        "release",
    ):
        print(f"| {step} | " + " | ".join(f"{steps.micros[step]:.0f}" for steps in results) + " |")
    rows = [f"{steps.micros['tokenizers'] / steps.micros['encode']:.1f}×" for steps in results]
    print("| `tokenizers` would take | " + " | ".join(rows) + " |")


def print_loads(name: str, loads: list[Load], chunks: int) -> None:
    """One row a load."""
    print(f"\nRequests through kvpin, four clients, µs each ({name})\n")
    print("| request | engine alone | through kvpin | CPU of kvpin |")
    print("|---|---:|---:|---:|")
    for load in loads:
        print(f"| {load.name} | {load.direct:.0f} | {load.through:.0f} | {load.cpu:.0f} |")
    print(f"\nCPU of kvpin per streamed chunk: {(loads[-1].cpu - loads[0].cpu) / chunks:.1f} µs")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60, help="chats of each length (60)")
    parser.add_argument("--requests", type=int, default=1000, help="requests of each length (1000)")
    parser.add_argument("--chunks", type=int, default=400, help="chunks of a streamed answer (400)")
    parser.add_argument("--only", choices=("steps", "requests"), help="one half alone")
    options = parser.parse_args()
    tokenizers = {
        "vocabulary 4,096": DEFAULT_MODEL,
        f"vocabulary {LARGE_VOCABULARY:,}": large_tokenizer(LARGE_VOCABULARY),
    }
    if options.only != "requests":
        for name, source in tokenizers.items():
            print_steps(name, measure_steps(source, (200, 2000, 8000), options.repeats))
    if options.only != "steps":
        for reuse in (True, False):
            loads = asyncio.run(
                measure_requests(DEFAULT_MODEL, options.requests, options.chunks, reuse=reuse)
            )
            print_loads(f"reuse {'on' if reuse else 'off'}", loads, options.chunks)


if __name__ == "__main__":
    main()
