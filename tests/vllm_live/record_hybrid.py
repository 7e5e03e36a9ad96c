"""Records the KV events of a real vLLM with a hybrid model, beside what each request reused.

    python -m tests.vllm_live.record_hybrid gemma3 tests/data/hybrid_events/gemma3.jsonl.gz
        [--requests 100] [--blocks 200] [--at-once 1]

One JSON object a line, in the order in which things happened: {"events": [those of a batch]}, {"asked":
[token ids], "id": number} for a request that is sent, and {"answered": number, "cached": tokens}. Requests
are sent straight to the server, once the events before them came; with --at-once, several together.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq
import zmq.asyncio

from tests.live.server_world import MODEL, WAIT_S
from tests.vllm_live.hybrid_models import make_model
from tests.vllm_live.mixed_run import ANSWER, Mix, Talk
from tests.vllm_live.vllm_world import VllmOptions, running_vllm

TALKS = 8
BLOCKS = {"gemma3": 200, "gpt-oss": 70}  # about a third of what the conversations take
_DRAINED_S = 0.5


class Recorder:
    """The lines of a recording, as they come."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.lines: list[dict[str, Any]] = []
        self._client = client
        self._asked = 0

    async def listen(self, events: zmq.asyncio.Socket) -> None:
        """Notes all events. Never ends."""
        while True:
            _, batch, _ = msgspec.msgpack.decode((await events.recv_multipart())[-1])
            self.lines.append({"events": batch})

    async def tokens(self, talk: Talk) -> list[int]:
        """The prompt of a conversation's next request."""
        answer = await self._client.post("/tokenize", json={"model": MODEL, **_prompt(talk)})
        return answer.raise_for_status().json()["tokens"]

    async def ask(self, talk: Talk, tokens: list[int]) -> None:
        """Sends the next request of a conversation."""
        number, self._asked = self._asked, self._asked + 1
        self.lines.append({"asked": tokens, "id": number})
        path = "/v1/chat/completions" if talk.chat else "/v1/completions"
        fields = {"model": MODEL, "max_tokens": ANSWER, "temperature": 0, "return_token_ids": True}
        response = await self._client.post(path, json=fields | _prompt(talk))
        answer = response.raise_for_status().json()
        choice, usage = answer["choices"][0], answer["usage"]
        assert tokens == (answer if talk.chat else choice)["prompt_token_ids"]
        self.lines.append({"answered": number, "cached": usage["prompt_tokens_details"]["cached_tokens"]})
        if talk.chat:
            talk.messages.append({"role": "assistant", "content": choice["message"]["content"]})
        else:
            talk.messages[0]["content"] += choice["text"]
        talk.prompt_tokens = len(tokens)


def _prompt(talk: Talk) -> dict[str, Any]:
    return {"messages": talk.messages} if talk.chat else {"prompt": talk.messages[0]["content"]}


async def record(
    shape: str, directory: Path, *, requests: int, blocks: int, at_once: int
) -> list[dict[str, Any]]:
    """The lines of a recording."""
    model = make_model(directory / "model", shape)
    options = VllmOptions(blocks, model=model, flags=("--load-format", "dummy"))
    mix = Mix(1, TALKS, chats=1.0 if shape == "gemma3" else 0.0, loras=0.0)
    with (
        zmq.asyncio.Context() as context,
        context.socket(zmq.SUB) as events,
        running_vllm(directory / "log", options) as server,
    ):
        events.setsockopt(zmq.SUBSCRIBE, b"")
        events.connect(f"tcp://127.0.0.1:{server.event_port}")
        await asyncio.to_thread(server.wait)
        async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S, trust_env=False) as client:
            recorder = Recorder(client)
            listening = asyncio.create_task(recorder.listen(events))
            for _ in range(requests // at_once):
                talks = mix.turns(at_once)
                prompts = [await recorder.tokens(talk) for talk in talks]
                await asyncio.gather(*map(recorder.ask, talks, prompts))
                await asyncio.sleep(_DRAINED_S)
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening
    return recorder.lines


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Writes a recording."""
    encode = json.JSONEncoder(separators=(",", ":"), default=lambda name: {"__bytes__": name.hex()}).encode
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("\n".join(map(encode, lines)).encode() + b"\n", 9, mtime=0))


def main() -> None:
    """Records."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=BLOCKS)
    parser.add_argument("path", type=Path)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--at-once", type=int, default=1)
    args = parser.parse_args()
    blocks = args.blocks or BLOCKS[args.shape]
    with tempfile.TemporaryDirectory() as directory:
        recording = record(
            args.shape, Path(directory), requests=args.requests, blocks=blocks, at_once=args.at_once
        )
        lines = asyncio.run(recording)
    write_lines(args.path, lines)


if __name__ == "__main__":
    main()
