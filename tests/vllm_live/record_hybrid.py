"""Records the KV events of a real vLLM with a hybrid model, beside what each request reused.

    python -m tests.vllm_live.record_hybrid gemma3 tests/data/hybrid_events/gemma3.jsonl.gz

One JSON object a line, in the order in which things happened: {"events": [those of a batch]}, or {"asked":
[token ids], "cached": tokens}. Each request is sent alone, straight to the server, once the
events before it came.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq

from tests.live.server_world import MODEL, WAIT_S
from tests.vllm_live.hybrid_models import make_model
from tests.vllm_live.mixed_run import ANSWER, Mix
from tests.vllm_live.vllm_world import VllmOptions, running_vllm

REQUESTS, TALKS = 100, 8
BLOCKS = {"gemma3": 200, "gpt-oss": 70}  # about a third of what the conversations take
_DRAINED_MS = 500


def record(shape: str, directory: Path) -> list[dict[str, Any]]:
    """The lines of a recording."""
    model = make_model(directory / "model", shape)
    options = VllmOptions(BLOCKS[shape], model=model, flags=("--load-format", "dummy"))
    lines: list[dict[str, Any]] = []
    with (
        zmq.Context() as context,
        context.socket(zmq.SUB) as events,
        running_vllm(directory / "log", options) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S, trust_env=False) as client,
    ):
        events.setsockopt(zmq.SUBSCRIBE, b"")
        events.connect(f"tcp://127.0.0.1:{server.event_port}")
        server.wait()
        mix = Mix(1, TALKS, chats=1.0 if shape == "gemma3" else 0.0, loras=0.0)
        for _ in range(REQUESTS):
            (talk,) = mix.turns(1)
            fields = {"model": MODEL, "max_tokens": ANSWER, "temperature": 0, "return_token_ids": True}
            if talk.chat:
                path, asked = "/v1/chat/completions", {"messages": talk.messages}
            else:
                path, asked = "/v1/completions", {"prompt": talk.messages[0]["content"]}
            answer = client.post(path, json=fields | asked).raise_for_status().json()
            choice, usage = answer["choices"][0], answer["usage"]
            token_ids = answer["prompt_token_ids"] if talk.chat else choice["prompt_token_ids"]
            assert len(token_ids) == usage["prompt_tokens"]
            lines.append({"asked": token_ids, "cached": usage["prompt_tokens_details"]["cached_tokens"]})
            if talk.chat:
                talk.messages.append({"role": "assistant", "content": choice["message"]["content"]})
            else:
                talk.messages[0]["content"] += choice["text"]
            talk.prompt_tokens = len(token_ids)
            while events.poll(_DRAINED_MS):
                _, batch, _ = msgspec.msgpack.decode(events.recv_multipart()[-1])
                lines.append({"events": batch})
    return lines


def main() -> None:
    """Records."""
    shape, path = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        lines = record(shape, Path(directory))
    encode = json.JSONEncoder(separators=(",", ":"), default=lambda name: {"__bytes__": name.hex()}).encode
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(gzip.compress("\n".join(map(encode, lines)).encode() + b"\n", 9, mtime=0))


if __name__ == "__main__":
    main()
