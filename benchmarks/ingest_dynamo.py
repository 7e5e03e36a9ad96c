"""The side of `ingest.py --peer` that runs in the environment of ai-dynamo-runtime.

Follows the event socket of one engine with Dynamo's selection service. Each line on standard input has token
ids: once the engine is known to hold them, the CPU seconds of this process come back as one line.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from dynamo._core import SelectionService

LOOK_S = 0.02


async def main(endpoint: str, tokens_per_block: int) -> None:
    """Answers until standard input ends."""
    service = SelectionService()
    await service.upsert_worker(
        {
            "worker_id": 0,
            "endpoint": endpoint.replace("tcp", "http"),
            "kv_events_endpoint": endpoint,
            "block_size": tokens_per_block,
            "total_kv_blocks": 1_000_000,
            "max_num_batched_tokens": 8192,
        }
    )
    for line in sys.stdin:
        tokens = json.loads(line)
        while True:
            scores = await service.overlap_scores({"token_ids": tokens})
            if scores["workers"] and scores["workers"][0]["device_blocks"] == len(tokens) // tokens_per_block:
                break
            await asyncio.sleep(LOOK_S)
        print(json.dumps({"cpu_s": time.process_time()}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
