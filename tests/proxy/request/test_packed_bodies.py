"""Compressed bodies of requests."""

import errno
import gzip
import tracemalloc
import zlib

import pytest
import zstandard
from structlog.testing import capture_logs

from proxy.errors import BadRequest, BodyTooLarge, NoMemory
from proxy.request.bodies import room_for, unpacked

TEXT = b'{"messages": "' + b"hello, world. " * 300_000 + b'"}'
PACK = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}


def raw_deflate(data):
    writer = zlib.compressobj(wbits=-15)
    return writer.compress(data) + writer.flush()


async def plain(raw, encoding, *, limit=1 << 30, hold=lambda _size: None):
    return await unpacked(raw, encoding, limit, hold)


@pytest.mark.parametrize(
    ("encoding", "pack"), [*PACK.items(), ("deflate", raw_deflate)], ids=[*PACK, "deflate without a head"]
)
async def test_a_body_is_unpacked(encoding, pack):
    for text in (b"{}", TEXT):
        assert await plain(pack(text), encoding) == text


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_a_body_of_several_members_is_unpacked(encoding):
    packed = PACK[encoding]
    assert await plain(packed(b'{"a":') + packed(TEXT) + packed(b"}"), encoding) == b'{"a":' + TEXT + b"}"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
async def test_a_bomb_is_refused_before_it_is_unpacked(encoding):
    bomb = PACK[encoding](bytes(64 << 20))
    tracemalloc.start()
    with pytest.raises(BodyTooLarge, match="more than 1048576 bytes when it is unpacked"):
        await plain(bomb, encoding, limit=1 << 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
@pytest.mark.parametrize("cut", [1, 3, 20, 100])
async def test_an_incomplete_body_is_told_so(encoding, cut):
    packed = PACK[encoding](TEXT)
    with pytest.raises(BadRequest, match="ends too early"):
        await plain(packed[:-cut], encoding)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
async def test_a_broken_body_is_told_so(encoding):
    for raw in (b"hello, world", b"\0" * 50, PACK[encoding](TEXT)[:200] + b"\xff" * 400, b"{}"):
        with pytest.raises(BadRequest, match=f"{encoding}"):
            await plain(raw, encoding)


async def test_memory_is_taken_as_it_is_unpacked():
    told, packed = [], gzip.compress(TEXT)
    await plain(packed, "gzip", hold=told.append)
    assert told == sorted(told)
    assert told[0] < 3 << 20
    assert told[-1] == len(packed) + len(TEXT)

    def refuse(size):
        if size > 2 << 20:
            raise NoMemory("no")

    with pytest.raises(NoMemory):
        await plain(packed, "gzip", hold=refuse)


def test_a_full_directory_is_told_to_client_and_operator():
    refused = pytest.raises(NoMemory, match="no room for the form in its temporary")
    with capture_logs() as lines, refused, room_for("the form"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert [line["error"] for line in lines] == ["No space left on device"]


def test_other_errors_stay_what_they_are():
    with pytest.raises(ValueError, match="other"), room_for("the form"):
        raise ValueError("other")
