"""Digests of real models: told by bytes where they can be read, by what they say elsewhere."""

from __future__ import annotations

import shutil

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from engine_adapter.errors import EngineUnavailable
from engine_adapter.llama_server.fingerprint import file_digest, model_parts, remote_digest
from scripts.make_gguf import gguf_path
from tests.engines import served

MIB = 1 << 20


@pytest.fixture
def model(tmp_path):
    """A copy of the tiny model to change."""
    return shutil.copy(gguf_path("tiny"), tmp_path / "model.gguf")


def change(path, offset, length=1):
    with path.open("r+b") as file:
        file.seek(offset)
        was = file.read(length)
        file.seek(offset)
        file.write(bytes(byte ^ 0xFF for byte in was))


def test_a_copy_is_the_same_model(model):
    assert file_digest(model) == file_digest(gguf_path("tiny"))


def test_other_weights_of_the_same_shape_are_another_model():
    assert file_digest(gguf_path("tiny", 1)) != file_digest(gguf_path("tiny"))


@pytest.mark.parametrize("at", [0, MIB - 1, -1, -MIB])
def test_a_byte_of_the_ends_counts(model, at):
    before = file_digest(model)
    change(model, at % model.stat().st_size)
    assert file_digest(model) != before


@pytest.mark.parametrize("share", [0.2, 0.35, 0.5, 0.81])
def test_no_tensor_between_is_missed(model, share):
    """Samples lie 16 kB apart here: a changed tensor of 32 kB is seen wherever it lies."""
    before = file_digest(model)
    change(model, int(model.stat().st_size * share), 32 << 10)
    assert file_digest(model) != before


def test_a_file_that_grew_is_another(model):
    before = file_digest(model)
    with model.open("ab") as file:
        file.write(b"\0")
    assert file_digest(model) != before


def test_a_small_file_is_read_whole(tmp_path):
    path = tmp_path / "small.gguf"
    path.write_bytes(bytes(3 * MIB))
    before = file_digest(path)
    change(path, 3 * MIB // 2)
    assert file_digest(path) != before


def test_parts_count_as_one_model(tmp_path):
    parts = [tmp_path / f"m-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    for part in parts:
        part.write_bytes(part.name.encode() * 100)
    assert model_parts(parts[0]) == parts
    before = file_digest(parts[0])
    change(parts[2], 50)
    assert file_digest(parts[0]) != before
    parts[1].unlink()
    with pytest.raises(FileNotFoundError):
        file_digest(parts[0])


async def digest(start_llama, control_of, *flags, seed=0, slot_id=0):
    """What a server says of the tiny model without its file being read."""
    control = control_of(start_llama(*flags, model=gguf_path("tiny", seed)).url)
    meta = (await control.get("/v1/models"))["data"][0]["meta"]
    return await remote_digest(control, meta, "model.gguf", slot_id)


async def test_servers_of_one_model_say_the_same(start_llama, control_of):
    one = await digest(start_llama, control_of)
    assert await digest(start_llama, control_of, "-np", "2", "-c", "2048", slot_id=1) == one


async def test_servers_of_other_weights_say_something_else(start_llama, control_of):
    assert await digest(start_llama, control_of) != await digest(start_llama, control_of, seed=1)


async def test_a_server_says_the_same_twice(control):
    assert await remote_digest(control, {}, "m", 0) == await remote_digest(control, {}, "m", 0)


async def test_the_name_of_the_file_counts(control):
    assert await remote_digest(control, {}, "m", 0) != await remote_digest(control, {}, "n", 0)


@pytest.mark.parametrize("answer", [{}, {"tokens": []}, {"content": "a"}])
async def test_an_answer_without_tokens(control_of, answer):
    app = Starlette(routes=[Route("/completion", lambda _: JSONResponse(answer), methods=["POST"])])
    with served(app) as url, pytest.raises(EngineUnavailable, match="no 'tokens'"):
        await remote_digest(control_of(url), {}, "m", 0)
