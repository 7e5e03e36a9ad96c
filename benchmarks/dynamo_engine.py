"""The engine of `mock_engine.py` as a Dynamo worker, for `live_routers.py`.

Runs in the environment of ai-dynamo. It gets prompts as token ids and gives token ids, as Dynamo's own
workers for vLLM do; Dynamo's publisher follows its KV events over ZMQ. Its HTTP port tells what it did.

    PYTHONPATH=… python benchmarks/dynamo_engine.py --port 8001 [options of mock_engine.py]
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from dynamo._core import DistributedRuntime
from dynamo.llm import KvEventPublisher, ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from mock_engine import MockVllm, made_engine, parser
from router_work import BLOCK_TOKENS, MODEL, MODEL_DIR

ENDPOINT = "dynamo.backend.generate"
# Of a batch: more than any load has in flight here.
MOST_SEQUENCES, MOST_BATCHED = 256, 8192


class Worker:
    """Answers Dynamo's requests from a mock engine."""

    def __init__(self, engine: MockVllm) -> None:
        self._engine = engine

    async def generate(self, request: dict[str, Any], context: object) -> AsyncIterator[dict[str, Any]]:  # noqa: ARG002 - Dynamo's
        """Yields the tokens of an answer as they come."""
        limit = request["stop_conditions"]["max_tokens"]
        prompt = self._engine.prompt_of(request["token_ids"])
        count = 0
        async with self._engine.cores[0].generate(prompt, limit) as generation:
            async for token in generation.output:
                count += 1
                if count < limit:
                    yield {"token_ids": [token]}
        usage = self._engine.usage(generation, count)
        yield {"token_ids": [token], "finish_reason": "length", "completion_usage": usage}


async def main() -> None:
    """Serves one engine until it is ended."""
    arguments = parser().parse_args()
    engine = made_engine(arguments)
    server = uvicorn.Server(
        uvicorn.Config(engine.app, port=arguments.port, log_level="critical", access_log=False)
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint(ENDPOINT)
    events = engine.publishers[0].endpoint.replace("*", "127.0.0.1")
    publisher = KvEventPublisher(
        endpoint, kv_block_size=BLOCK_TOKENS, enable_local_indexer=True, zmq_endpoint=events
    )
    config = ModelRuntimeConfig()
    config.total_kv_blocks = arguments.kv_tokens // BLOCK_TOKENS
    config.max_num_seqs, config.max_num_batched_tokens = MOST_SEQUENCES, MOST_BATCHED
    config.enable_local_indexer = True
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat,
        endpoint,
        str(MODEL_DIR),
        MODEL,
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=BLOCK_TOKENS,
        runtime_config=config,
        ignore_weights=True,
    )
    await endpoint.serve_endpoint(Worker(engine).generate)
    publisher.shutdown()
    await serving


if __name__ == "__main__":
    asyncio.run(main())
