from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter import NamedModel, Upload


async def chunks_of(body: bytes, cuts: list[int]):
    for start, end in pairwise([0, *sorted(cuts), len(body)]):
        yield body[start:end]


async def read(upload: Upload) -> bytes:
    return b"".join([chunk async for chunk in upload.chunks])


@pytest.fixture(scope="module")
def body() -> bytes:
    return b"before [model] after"


@given(st.lists(st.integers(0, 20)), st.text(max_size=12))
async def test_only_the_name_changes_however_the_body_arrives(body, cuts, name):
    upload = Upload(chunks_of(body, cuts), len(body), NamedModel("model", 8, 13)).renamed(name)
    assert await read(upload) == b"before [" + name.encode() + b"] after" == await sent(upload)


async def sent(upload: Upload) -> bytes:
    """A body of the announced length that holds the name where it says."""
    named = upload.named
    return (
        b"before ["
        + named.model.encode()
        + b"] after"
        + b"?" * (upload.length - 15 - named.end + named.start)
    )


async def test_a_second_name_replaces_the_first(body):
    upload = Upload(chunks_of(body, [9, 10]), None, NamedModel("model", 8, 13)).renamed("a").renamed("other")
    assert (upload.length, await read(upload)) == (None, b"before [other] after")


async def test_what_names_no_model_stays_as_it_is(body):
    upload = Upload(chunks_of(body, []), len(body))
    assert upload.renamed("m") is upload
