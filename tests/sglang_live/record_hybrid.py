"""Records the KV events of a real SGLang with sliding windows, beside what each request reused.

    python -m tests.sglang_live.record_hybrid tests/data/hybrid_events/sglang-mellum.jsonl.gz [--requests 100]

The lines are those of tests/vllm_live/record_hybrid.py. Prompts are token ids, sent straight to the server
once the events before them came: conversations that grow turn by turn, some from an earlier place.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq
import zmq.asyncio

from tests.live.server_world import WAIT_S
from tests.sglang_live.sglang_world import SglangOptions, running_sglang
from tests.vllm_live.hybrid_models import make_model
from tests.vllm_live.record_hybrid import write_lines

FLAGS = ("--enable-cache-report", "--load-format", "dummy", "--swa-full-tokens-ratio", "1.0")
TALKS, LONGEST, IDS, ANSWER = 8, 900, range(10, 4000), 24
_DRAINED_S = 0.4


class Talks:
    """Conversations with one of two system prompts."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)  # noqa: S311 - not for secrets
        self._systems = [self._ids(300), self._ids(416)]
        self._turns: list[list[list[int]]] = [[] for _ in range(TALKS)]

    def _ids(self, count: int) -> list[int]:
        return self._dice.choices(IDS, k=count)

    def next(self) -> tuple[list[list[int]], list[int]]:
        """A conversation's turns, and its next prompt. One in eight goes on from an earlier turn, and one in
        three from any place in a turn."""
        at = self._dice.randrange(TALKS)
        if not self._turns[at] or len(self._turns[at][-1]) > LONGEST:
            self._turns[at] = [list(self._dice.choice(self._systems))]
        turns = self._turns[at]
        before = self._dice.choice(turns) if self._dice.random() < 1 / 8 else turns[-1]
        if self._dice.random() < 1 / 3:
            before = before[: self._dice.randrange(len(before) // 2, len(before))]
        return turns, before + self._ids(self._dice.randint(10, 120))


async def record(directory: Path, requests: int) -> list[dict[str, Any]]:
    """The lines of a recording."""
    lines: list[dict[str, Any]] = []
    options = SglangOptions(model=make_model(directory / "model", "mellum"), flags=FLAGS)
    with (
        zmq.asyncio.Context() as context,
        context.socket(zmq.SUB) as events,
        running_sglang(directory / "log", options) as server,
    ):
        events.setsockopt(zmq.SUBSCRIBE, b"")
        events.connect(f"tcp://127.0.0.1:{server.event_port}")
        await asyncio.to_thread(server.wait)

        async def listen() -> None:
            while True:
                batch = msgspec.msgpack.decode((await events.recv_multipart())[-1])
                lines.append({"events": batch[1]})

        listening, talks = asyncio.create_task(listen()), Talks(1)
        async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S, trust_env=False) as client:
            for number in range(requests):
                turns, prompt = talks.next()
                lines.append({"asked": prompt, "id": number})
                parameters = {"max_new_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
                body = {"input_ids": prompt, "sampling_params": parameters}
                answer = (await client.post("/generate", json=body)).raise_for_status().json()
                lines.append({"answered": number, "cached": answer["meta_info"]["cached_tokens"]})
                turns.append(prompt + answer["output_ids"])
                await asyncio.sleep(_DRAINED_S)
        listening.cancel()
        with suppress(asyncio.CancelledError):
            await listening
    return lines


def main() -> None:
    """Records."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--requests", type=int, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_lines(args.path, asyncio.run(record(Path(directory), args.requests)))


if __name__ == "__main__":
    main()
