"""Routes that kvpin passes on, through `kvpin serve` and an engine: nothing is held in memory."""

from __future__ import annotations

import asyncio
import base64
import os
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from tests.engines import served
from tests.live.conftest import running_kvpin

pytestmark = pytest.mark.live

UPLOAD = 200 << 20
MB = 1 << 20
VECTOR = base64.b64encode(bytes(range(256))).decode()


async def models(_):
    return JSONResponse({"object": "list", "data": [{"id": "m"}]})


async def upload(request: Request):
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
    return JSONResponse({"id": "file-1", "bytes": size, "kind": request.headers["content-type"]})


async def speech(request: Request):
    spoken = (await request.json())["input"].encode()

    async def sound():
        for _ in range(50):
            yield b"\x00\xff" + spoken
            await asyncio.sleep(0)

    return StreamingResponse(sound(), media_type="audio/mpeg")


async def embeddings(request: Request):
    asked = await request.json()
    assert asked["encoding_format"] == "base64"
    data = [{"object": "embedding", "index": 0, "embedding": VECTOR}]
    return JSONResponse(
        {"object": "list", "data": data, "model": "m", "usage": {"prompt_tokens": 1, "total_tokens": 1}}
    )


@pytest.fixture(scope="module")
def kvpin(tmp_path_factory):
    app = Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/files", upload, methods=["POST"]),
            Route("/v1/audio/transcriptions", upload, methods=["POST"]),
            Route("/v1/audio/speech", speech, methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
        ]
    )
    log = tmp_path_factory.mktemp("passed-on") / "log"
    with pytest.MonkeyPatch.context() as environment, served(app) as url:
        environment.setenv("KVPIN_LIMITS__BODY_BYTES", "256MiB")
        with running_kvpin(log, f"--engine=openai_compatible={url}", tokenised=False) as proxy:
            yield proxy


def peak_mb(kvpin):
    """The most memory that kvpin has ever held, in MB."""
    status = Path(f"/proc/{kvpin.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


@pytest.mark.parametrize(("route", "chunked"), [("files", False), ("audio/transcriptions", True)])
def test_a_large_upload_is_not_held_in_memory(kvpin, route, chunked):
    def body():
        for _ in range(UPLOAD // MB):
            yield os.urandom(16) * (MB // 16)

    before = peak_mb(kvpin)
    headers = {"content-type": "multipart/form-data; boundary=b"}
    if not chunked:
        headers["content-length"] = str(UPLOAD)
    answer = httpx.post(
        f"{kvpin.base_url}/{route}", content=body(), headers=headers, timeout=120, trust_env=False
    )
    assert answer.json() == {"id": "file-1", "bytes": UPLOAD, "kind": headers["content-type"]}
    assert peak_mb(kvpin) < before + 30


def test_the_sdk_passes_files_and_hears_speech(kvpin):
    with OpenAI(base_url=kvpin.base_url, api_key="unused", max_retries=0, timeout=60) as client:
        uploaded = client.files.create(file=("a.jsonl", b"{}\n"), purpose="batch")
        assert uploaded.id == "file-1"
        spoken = client.audio.speech.create(model="m", voice="alloy", input="ahoy")
        assert spoken.content == b"\x00\xffahoy" * 50
        assert spoken.response.headers["content-type"] == "audio/mpeg"
        vector = client.embeddings.create(model="m", input="x").data[0].embedding
    assert len(vector) == 64  # the SDK reads base64 as floats


def test_a_refused_upload_is_answered(kvpin):
    def body():
        for _ in range(300):
            yield bytes(MB)

    headers = {"content-type": "multipart/form-data; boundary=b", "content-length": str(300 * MB)}
    with httpx.Client(trust_env=False, timeout=60) as client:
        answer = client.post(f"{kvpin.base_url}/files", content=body(), headers=headers)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        assert client.get(f"{kvpin.base_url}/models").status_code == 200
