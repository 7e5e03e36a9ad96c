"""Forms on real sockets: their model chooses the pool, and every byte reaches the engine."""

import asyncio
import os
import resource
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from proxy.api.forms import new_spool, read_form
from proxy.errors import BadRequest
from proxy.fleet.engine import EngineState
from tests.fakes import FakeAdapter, FakeEngine, client_of, connect_to, is_openai_error, post, proxy_over

PATH = "/v1/audio/transcriptions"
KIND = "multipart/form-data; boundary=b0undary"


def part(name: str, value: bytes, more: str = "") -> bytes:
    return (
        f'--b0undary\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode()
        + value
        + b"\r\n"
    )


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--b0undary--\r\n"


FILE = part("file", b"RIFF\r\n--b0undar\r\nmodel", '; filename="a.wav"\r\nContent-Type: audio/wav')
LANGUAGE = part("language", b"m")


async def chunks_of(body: bytes, cuts=()):
    for start, end in pairwise([0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]):
        yield body[start:end]


async def read(body: bytes, cuts=(), kind=KIND):
    """The name that was found, the bytes it was found in, and all that is passed on."""
    with new_spool() as spool:
        upload = await read_form(chunks_of(body, cuts), kind, len(body), spool)
        passed_on = b"".join([chunk async for chunk in upload.chunks])
    named = upload.named
    return (
        (None, None, passed_on) if named is None else (named.model, body[named.start : named.end], passed_on)
    )


@given(
    st.lists(st.integers(0, 600)),
    st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1),
)
async def test_the_name_is_found_however_the_form_arrives(cuts, name):
    body = form(LANGUAGE, FILE, part("model", name.encode()), part("prompt", b"model"))
    assert await read(body, cuts) == (name, name.encode(), body)


@pytest.mark.parametrize("parts", [[], [FILE], [part("model", b"")], [part("models", b"m"), FILE]])
async def test_a_form_without_a_name(parts):
    body = form(*parts)
    assert await read(body, range(0, len(body), 7)) == (None, None, body)


async def test_nothing_behind_the_name_is_read_ahead():
    async def endless():
        yield part("model", b"m") + b"--b0undary\r\n"
        raise AssertionError("read on")

    with new_spool() as spool:
        upload = await read_form(endless(), KIND, None, spool)
        assert (upload.named.model, upload.length) == ("m", None)


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (form(FILE), "multipart/form-data", "needs a boundary"),
        (form(FILE), "multipart/form-data; boundary=" + "x" * 500, "needs a boundary"),
        (b"no form", KIND, "no multipart form"),
        (form(part("model", b"\xff")), KIND, "not UTF-8"),
        (form(part("model", b"x" * 2000)), KIND, "longer than a name"),
    ],
)
async def test_what_is_no_form_is_the_clients_fault(body, kind, said):
    with pytest.raises(BadRequest, match=said):
        await read(body, kind=kind)


async def test_a_name_that_begins_like_the_boundary_is_none():
    body = form(part("model", b"\r\n--b0und"))
    cut = body.index(b"\r\n--b0und\r") + 4
    with pytest.raises(BadRequest, match="no name"):
        await read(body, [cut])


async def transcribe(exchange):
    await exchange.send({"text": "ok"})


@pytest.fixture
async def world():
    """Two engines of two models, and a client; `bar` is an alias of `n`."""
    async with (
        FakeEngine("a") as a,
        FakeEngine("b") as b,
        proxy_over(a, aliases={"bar": "n"}, max_body_bytes=4 << 20) as proxy,
        client_of(proxy) as client,
    ):
        a.script = b.script = transcribe
        proxy.add(b, model="n")
        client.proxy, client.a, client.b = proxy, a, b
        yield client
        await proxy.settled()


async def send(world, body, **options):
    return await world.post(PATH, content=body, headers={"content-type": KIND}, **options)


@pytest.mark.parametrize("before", [[], [FILE], [part("file", os.urandom(3 << 20)), LANGUAGE]])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_the_model_chooses_the_engine_and_every_byte_arrives(world, before, is_chunked):
    for engine, name in ((world.a, b"m"), (world.b, b"n")):
        body = form(*before, part("model", name), FILE)
        response = await send(world, chunks_of(body, [9]) if is_chunked else body)
        assert response.headers["x-kvpin-engine"] == engine.id
        exchange = engine.seen[-1]
        assert exchange.body == body
        assert ("content-length" in exchange.headers) is not is_chunked
        assert world.proxy.last.model == name.decode()


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_in_place_of_an_alias_stands_the_engines_own_name(world, is_chunked):
    body = form(LANGUAGE, FILE, part("model", b"bar"), part("prompt", b"bar"))
    await send(world, chunks_of(body, [9]) if is_chunked else body)
    assert world.b.seen[-1].body == form(LANGUAGE, FILE, part("model", b"n"), part("prompt", b"bar"))


async def test_an_engine_that_takes_any_name_gets_the_form_as_it_is(world):
    engine = world.proxy.fleet.engines["b"]
    world.proxy.fleet.leave(engine)
    world.proxy.add(FakeAdapter("c", world.b.url), model="n", any_model=True)
    world.proxy.fleet.remove(world.proxy.fleet.engine("b"))
    for name in (b"bar", b"whisper-1"):
        body = form(part("model", name), FILE)
        assert (await send(world, body)).headers["x-kvpin-engine"] == "c"
        assert world.b.seen[-1].body == body


@pytest.mark.parametrize("parts", [[FILE], [part("model", b"whisper-1"), FILE]])
async def test_without_a_model_of_its_own_it_is_for_the_default_one(world, parts):
    assert is_openai_error(await send(world, form(*parts)), 404, "model_not_found", "model")
    world.proxy.fleet.default_model = "n"
    await send(world, form(*parts))
    assert world.b.seen[-1].body == form(*parts).replace(b"whisper-1", b"n")


async def test_a_file_without_a_form_is_for_the_default_model(world):
    world.proxy.fleet.default_model = "n"
    for route in (PATH, "/v1/files"):
        assert (
            await world.post(route, content=b"RIFF", headers={"content-type": "audio/wav"})
        ).status_code == 200
        assert world.b.seen[-1].body == b"RIFF"


async def test_an_engine_has_its_own_name_for_the_pools_model(world):
    world.proxy.fleet.leave(world.proxy.fleet.engines["b"])
    engine = world.proxy.fleet.add(FakeAdapter("c", world.b.url, model="n"))
    world.proxy.fleet.join(engine, engine.adapter.info)  # it calls the model `m`
    engine.state = EngineState.READY
    await send(world, form(FILE, part("model", b"bar")))
    assert world.b.seen[-1].body == form(FILE, part("model", b"m"))


async def test_a_form_too_long_before_its_model_is_a_413(world):
    body = form(part("file", bytes(5 << 20)), part("model", b"n"))
    assert is_openai_error(await send(world, chunks_of(body)), 413, "body_too_large")
    assert not world.a.seen
    assert not world.b.seen


async def test_no_form_is_a_400(world):
    assert is_openai_error(await send(world, b"no form"), 400)


async def test_a_client_that_leaves_before_its_model_leaves_nothing_behind(world):
    head = post(PATH, b"", f"content-type: {KIND}").replace(b"content-length: 0", b"content-length: 9999")
    _, writer = await connect_to(world.proxy)
    writer.write(head + FILE)
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await asyncio.sleep(0.05)
    assert (await send(world, form(part("model", b"n")))).status_code == 200


async def test_where_the_name_decides_nothing_a_form_is_not_read_ahead(engine, proxy):
    """Its engine has the beginning before the client has sent the rest."""

    async def script(exchange):
        await exchange.receive(b"model")
        await exchange.send({"text": "ok"})

    script.reads_body = False
    engine.script = script
    head = post(PATH, b"", f"content-type: {KIND}").replace(b"content-length: 0", b"content-length: 9999")
    reader, writer = await connect_to(proxy)
    writer.write(head + FILE)
    assert b'"ok"' in await asyncio.wait_for(reader.readuntil(b"}"), 5)
    writer.close()


async def test_a_content_type_that_is_too_long():
    """Reading its parameters takes quadratic time."""
    with pytest.raises(BadRequest):
        await read(form(FILE), kind=KIND + ";" * 5000)


async def test_others_have_the_loop_between_pieces_of_a_large_chunk():
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    body = form(*[part("a", b"b")] * 2000, part("model", b"m"), *[part("a", b"b")] * 2000)
    assert await read(body) == ("m", b"m", body)
    task.cancel()
    assert turns > 10


@pytest.fixture
def full():
    """No file may be longer than that: writing more is an error, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_form_that_the_temporary_directory_does_not_take(full):
    """The file stands before the model, so all of it would have to be kept."""
    body = form(part("file", bytes(6 << 20), '; filename="a.wav"'), part("model", b"m"))
    async with FakeEngine("a") as engine, proxy_over(engine, max_body_bytes=8 << 20) as proxy:
        proxy.add(FakeAdapter("b"), model="other")
        async with client_of(proxy) as client:
            with capture_logs() as lines:
                response = await client.post(PATH, content=body, headers={"content-type": KIND})
            assert is_openai_error(response, 503, "overloaded")
            assert response.headers["retry-after"] == "60"
            assert "temporary directory" in response.json()["error"]["message"]
            assert [line["what"] for line in lines] == ["the form"]
            assert not engine.seen
