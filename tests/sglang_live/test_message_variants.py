"""What kvpin renders itself is what SGLang's own code renders: all ways to write a chat, all templates."""

from __future__ import annotations

import json
import os
import subprocess
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_adapter import EngineRejected, JsonBody
from engine_adapter.sglang import requests
from engine_adapter.sglang.requests import SGLANG_INPUT
from engine_adapter.types import TokenIds
from tests.live.message_variants import compare, model_with_bos
from tests.live.server_world import installed

pytestmark = [pytest.mark.live, pytest.mark.timeout(7200)]


class Renderer:
    """Asks renderer.py, in SGLang's Python."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def use(self, template: str) -> None:
        self._ask(template=template)

    async def tokenize(self, path: str, body: JsonBody) -> TokenIds[int]:
        return await requests.tokenize(self, path, body)

    tokenize_if_loaded = tokenize

    async def read(self, kind: type[Any], _method: str, _path: str, *, content: bytes) -> Any:
        """As a ControlClient reads the answer of `/tokenize`."""
        return kind(self._ids(tokenize=json.loads(content)))

    async def serve(self, body: JsonBody, ours: TokenIds[int] | None = None) -> TokenIds[int] | None:
        try:
            given = {} if ours is None else {"input_ids": ours.tolist()}
            return array("i", self._ids(chat=msgspec.json.decode(body.raw) | given))
        except EngineRejected:
            return None

    def _ids(self, **asked: object) -> list[int]:
        answer = self._ask(**asked)
        if "refused" in answer:
            raise EngineRejected(answer["refused"], status=400)
        return list(answer["ids"])

    def _ask(self, **asked: object) -> dict[str, Any]:
        to, answers = self._process.stdin, self._process.stdout
        to.write(json.dumps(asked) + "\n")
        to.flush()
        # Its libraries print too.
        return json.loads(next(line for line in answers if line.startswith("{")))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_with_bos(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory) -> Iterator[Renderer]:
    command = [installed("sglang"), Path(__file__).with_name("renderer.py"), model]
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    with (
        (tmp_path_factory.mktemp("sglang") / "log").open("w") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ) as process,
    ):
        yield Renderer(process)
        process.stdin.close()


async def test_no_difference_goes_unnoticed(engine, model, tell):
    counts, unnoticed = await compare(engine, SGLANG_INPUT, model)
    tell(f"{dict(counts)}; {len(unnoticed)} differ unnoticed")
    assert unnoticed == []
