"""Sends what schemathesis makes of OpenAI's API specification through kvpin. Run by scripts/test-schema.

Half of the requests follow the specification, half break it. kvpin stands in front of an embedded engine,
then of a llama-server. A 5xx, a broken connection or a minute without an answer is kvpin's fault, unless the
engine does the same when it gets the request directly: the engine's own. Ends with 1 if kvpin has faults.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.schemas import APIOperation, BaseSchema

ROUTES = (
    "chat",
    "completions",
    "responses",
    "models",
    "embeddings",
    "moderations",
    "files",
    "audio",
    "images",
)
HANG_S = 60.0
START_S = 180.0
SHORT = 4  # tokens of an answer, and answers to a request
LIMITS = {"chat/completions": "max_tokens", "completions": "max_tokens", "responses": "max_output_tokens"}
FAULTS = ("5xx", "drops", "hangs")
COLUMNS = ("cases", "2xx", "4xx", "engine's own", *(f"kvpin's {fault}" for fault in FAULTS))


@dataclass(frozen=True)
class World:
    """A kvpin and the engine behind it, by their addresses, and the engine's model."""

    name: str
    kvpin: str
    engine: str
    model: str


def main() -> int:
    """Runs all cases and prints their counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("specification", nargs="?", type=Path)
    parser.add_argument("--cases", type=int, default=40, help="requests for each operation and engine (40)")
    parser.add_argument("--engine", choices=("embedded", "llama"))
    parser.add_argument("--python", default=".venv/bin/python", help="kvpin's interpreter")
    options = parser.parse_args()
    schema, faults = read(options.specification), []
    print(f"| engine | operation | {' | '.join(COLUMNS)} |")
    print("|---|---|" + "---:|" * len(COLUMNS))
    total = Counter[str]()
    for name in (options.engine,) if options.engine else ("embedded", "llama"):
        with started(name, options.python) as world:
            for operation in operations(schema):
                counts = attempt(operation, world, options.cases, faults)
                total += counts
                print(f"| {name} | {operation.label} | {row(counts)} |", flush=True)
    print(f"| all | | {row(total)} |\n")
    print("\n".join(faults))
    return 1 if faults else 0


def row(counts: Counter[str]) -> str:
    """The counts in the order of the columns."""
    return " | ".join(str(counts[column]) for column in COLUMNS)


# --- the specification -----------------------------------------------------------------------------


def read(path: Path | None) -> BaseSchema:
    """The specification in a file, or one made of the openai package's types."""
    if path is not None:
        return schemathesis.openapi.from_path(path)
    return schemathesis.openapi.from_dict(of_the_package())


def of_the_package() -> dict[str, Any]:
    """The request bodies as the openai package types them. It does not ship the rest of the specification."""
    from openai.types import completion_create_params, embedding_create_params  # noqa: PLC0415 - one use
    from openai.types.chat import completion_create_params as chat  # noqa: PLC0415 - likewise
    from openai.types.responses import response_create_params  # noqa: PLC0415 - likewise
    from pydantic import TypeAdapter  # noqa: PLC0415 - likewise

    bodies = {
        "/chat/completions": chat.CompletionCreateParamsNonStreaming,
        "/completions": completion_create_params.CompletionCreateParamsNonStreaming,
        "/responses": response_create_params.ResponseCreateParamsNonStreaming,
        "/embeddings": embedding_create_params.EmbeddingCreateParams,
    }
    paths, schemas = {}, {}
    for route, body in bodies.items():
        made = TypeAdapter(body).json_schema(ref_template="#/components/schemas/{model}")
        schemas |= made.pop("$defs", {})
        content = {"application/json": {"schema": made}}
        answers = {"200": {"description": "an answer"}}
        paths[route] = {"post": {"requestBody": {"required": True, "content": content}, "responses": answers}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "the openai package's types", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def operations(schema: BaseSchema) -> Iterator[APIOperation]:
    """The operations on routes that kvpin serves."""
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation is not None and operation.path.split("/")[1] in ROUTES and "?" not in operation.path:
            yield operation


# --- requests --------------------------------------------------------------------------------------


def attempt(operation: APIOperation, world: World, cases: int, faults: list[str]) -> Counter[str]:
    """Sends requests of one operation; adds a line to `faults` for each that kvpin is to blame for."""
    counts, numbers = Counter[str](), itertools.count()

    def send(case: Case) -> None:
        steer(case, world.model, next(numbers))
        counts["cases"] += 1
        outcome = sent(case, world.kvpin)
        if outcome in FAULTS:
            outcome = "engine's own" if sent(case, world.engine) in FAULTS else f"kvpin's {outcome}"
        counts[outcome] += 1
        if outcome.startswith("kvpin's"):
            faults.append(f"{world.name}: {outcome}: {case.as_curl_command()[:2000]}")

    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        try:
            seed(0)(limited(cases // 2)(given(operation.as_strategy(generation_mode=mode))(send)))()
        except Unsatisfiable:  # e.g. an operation without parameters cannot be broken
            continue
    return counts


def limited(number: int) -> settings:
    """Settings of hypothesis for that many examples."""
    return settings(
        max_examples=max(number, 1),
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def steer(case: Case, model: str, number: int) -> None:
    """Names the engine's model in three of four requests, and keeps answers short."""
    body = case.body
    if not isinstance(body, dict):
        return
    if number % 4:
        body["model"] = model
    limit = LIMITS.get(case.path.strip("/"))
    if limit is not None:
        body.setdefault(limit, SHORT)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of"):
        if isinstance(body.get(name), int | float) and body[name] > SHORT:
            body[name] = SHORT


def sent(case: Case, url: str) -> str:
    """Sends a request; returns its outcome: `2xx` to `5xx`, `hangs` or `drops`."""
    try:
        status = case.call(
            base_url=f"{url}/v1", timeout=HANG_S, headers={"Authorization": "Bearer x"}
        ).status_code
    except requests.exceptions.Timeout:
        return "hangs"
    except (requests.exceptions.ConnectionError, requests.exceptions.ChunkedEncodingError):
        return "drops"
    return f"{status // 100}xx"


# --- engines ---------------------------------------------------------------------------------------


@contextmanager
def started(name: str, python: str) -> Iterator[World]:
    """Starts an engine and a kvpin in front of it; ends both."""
    port, own = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    if name == "embedded":
        command = [python, "-m", "engine_adapter.torch_engine", "--port", str(port), "--threads", "1"]
        engine, model = f"embedded={url}", "kvpin-tiny"
    else:
        command = [os.environ["LLAMA_SERVER"], "-m", os.environ["GGUF"], "--port", str(port), "-np", "4"]
        command += ["-c", "16384", "--slots", "--metrics", "--cache-ram", "0", "--no-ui", "--threads", "1"]
        engine, model = f"llama_server={url},model=tiny", "tiny"
    kvpin = [python, "-m", "proxy.cli", "serve", "--reuse", "--port", str(own), "--engine", engine]
    with ExitStack() as stack:
        for each in (command, kvpin):
            process = subprocess.Popen(each, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        wait(f"{url}/health")
        wait(f"http://127.0.0.1:{own}/health/ready")
        yield World(name, f"http://127.0.0.1:{own}", url, model)
        wait(f"http://127.0.0.1:{own}/health/ready")


def free_port() -> int:
    """A free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait(url: str) -> None:
    """Returns once this answers 200."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if requests.get(url, timeout=5).status_code == requests.codes.ok:
                return
        except requests.exceptions.RequestException:
            pass
        time.sleep(0.2)
    sys.exit(f"{url} does not answer 200")


if __name__ == "__main__":
    sys.exit(main())
