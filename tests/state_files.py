"""Files as llama-server saves them, made by hand or by a real server, and ways to make file access fail."""

from __future__ import annotations

import errno
import os
import resource
import struct
import subprocess
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

MAGIC, VERSION = 0x67677371, 3


def frame(tokens: Sequence[int], media: Sequence[int] = ()) -> array:
    return array("i", [-1, 1, len(tokens), *tokens, len(media), *media])


def state_bytes(
    words: Sequence[int], kv: bytes = b"", *, magic: int = MAGIC, version: int = VERSION
) -> bytes:
    return struct.pack("=III", magic, version, len(words)) + array("i", words).tobytes() + kv


def write_state(path: Path, tokens: Sequence[int], kv: bytes = b"", *, size: int | None = None) -> bytes:
    """Writes a saved file; with `size` its KV fills it up to so many bytes. Returns what was written."""
    data = state_bytes(frame(tokens), kv)
    if size is not None:
        pattern = bytes(range(251)) * ((size - len(data)) // 251 + 1)
        data += pattern[: size - len(data)]
    path.write_bytes(data)
    return data


def complete(url: str, tokens: Sequence[int], slot: int, predict: int = 1) -> dict:
    """A real server's greedy answer to a prompt of token ids on the given slot."""
    body = {"prompt": list(tokens), "id_slot": slot, "n_predict": predict, "temperature": 0}
    body["return_tokens"] = True
    return httpx.post(f"{url}/completion", json=body, timeout=60).raise_for_status().json()


def act(url: str, slot: int, action: str, name: str) -> httpx.Response:
    return httpx.post(f"{url}/slots/{slot}?action={action}", json={"filename": name}, timeout=60)


class LittleRoom:
    """A directory that can be filled up: a small tmpfs, or without the right to mount a limit on file sizes.

    Either way the kernel refuses the write.
    """

    def __init__(self, path: Path, size: int) -> None:
        path.mkdir()
        self.path, self.size = path, size
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path]
        self.is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0

    def close(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "-l", self.path], check=True)

    @contextmanager
    def full(self) -> Iterator[None]:
        """Inside the block, no byte can be written."""
        with self._filled() if self.is_mounted else _no_file_grows():
            yield

    @contextmanager
    def _filled(self) -> Iterator[None]:
        filler = self.path / "filler"
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            _write_for_ever(filler)
        try:
            yield
        finally:
            filler.unlink()


def _write_for_ever(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


@contextmanager
def _no_file_grows() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def unprivileged(directory: Path) -> Iterator[None]:
    """Inside the block, root is the user nobody, who owns `directory`: root itself may read every file."""
    if os.geteuid():
        yield
        return
    nobody = 65534
    for path in (directory, *directory.iterdir()):
        os.chown(path, nobody, nobody)
    os.seteuid(nobody)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def no_handles() -> Iterator[None]:
    """Inside the block, the process can open no further file."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        os.close(lowest)
