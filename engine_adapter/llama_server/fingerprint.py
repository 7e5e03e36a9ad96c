"""A digest of the model a server runs: KV of one model is noise to another model of the same shape.

A GGUF that kvpin can read is identified by its bytes. Otherwise the digest covers what the server says of the
model, and how the model continues a fixed prompt.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from engine_adapter.errors import EngineUnavailable
from engine_adapter.http.control import ControlClient

_ENDS = 1 << 20  # bytes read at the head (metadata, vocabulary) and at the tail
_SAMPLES, _SAMPLE = 512, 4096  # evenly between: a tensor of 0.2% of the file is hit at least once
_WHOLE = 2 * _ENDS + _SAMPLES * _SAMPLE
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# A fixed prompt of different ids, small enough for any vocabulary, and the length of its continuation.
_PROMPT = tuple(300 + 37 * i % 501 for i in range(24))
_CONTINUATION = 16


def file_digest(path: Path) -> str:
    """Digest of a GGUF with all its parts: their sizes, and about 4 MiB of each part.

    Takes milliseconds with a warm page cache. Unchanged files are read once.
    """
    files = []
    for part in model_parts(path):
        status = part.stat()
        files.append((str(part), status.st_size, status.st_mtime_ns, status.st_ino))
    return _digest(tuple(files))


def model_parts(path: Path) -> list[Path]:
    """The files of a model: `path`, or all parts if its name is like `…-00001-of-00003.gguf`."""
    name = _PART.search(path.name)
    if name is None:
        return [path]
    stem = path.name[: name.start()]
    return [path.with_name(f"{stem}-{i:05}-of-{name[2]}.gguf") for i in range(1, int(name[2]) + 1)]


async def remote_digest(control: ControlClient, meta: dict[str, Any], file_name: str, slot_id: int) -> str:
    """Digest of a model whose file is out of reach, by its `meta` in `/v1/models` and the name of its file.

    Slot `slot_id` continues the fixed prompt: its content is lost. Raises EngineUnavailable if the answer has
    no tokens.
    """
    request = {
        "prompt": _PROMPT, "n_predict": _CONTINUATION, "temperature": 0, "ignore_eos": True,
        "return_tokens": True, "cache_prompt": False, "id_slot": slot_id,
    }  # fmt: skip
    answer = await control.call("POST", "/completion", json=request)
    match answer:
        case {"tokens": [int(), *_] as tokens}:
            shape = {name: value for name, value in sorted(meta.items()) if name != "n_ctx"}
            return xxhash.xxh3_128_hexdigest(msgspec.json.encode([shape, file_name, tokens]))
        case _:
            raise EngineUnavailable("POST /completion: the answer has no 'tokens'")


@lru_cache(maxsize=64)
def _digest(files: tuple[tuple[str, int, int, int], ...]) -> str:
    state = xxhash.xxh3_128()
    for name, size, _mtime, _inode in files:
        state.update(struct.pack("<Q", size))
        with Path(name).open("rb", buffering=0) as file:
            for offset, length in _samples(size):
                file.seek(offset)
                state.update(file.read(length))
    return state.hexdigest()


def _samples(size: int) -> Iterator[tuple[int, int]]:
    """Offsets and lengths of the parts of a file that are read."""
    if size <= _WHOLE:
        yield 0, size
        return
    yield 0, _ENDS
    between = size - 2 * _ENDS - _SAMPLE
    for index in range(_SAMPLES):
        yield _ENDS + between * index // (_SAMPLES - 1), _SAMPLE
    yield size - _ENDS, _ENDS
