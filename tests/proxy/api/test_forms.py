"""Forms on real sockets: their model chooses the pool, and every byte reaches the engine."""

import asyncio
import os

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from proxy.api.paths import read_form
from proxy.errors import BadRequest
from tests.fakes import FakeAdapter, FakeEngine, client_of, connect_to, is_openai_error, post, proxy_over

PATH = "/v1/audio/transcriptions"
KIND = "multipart/form-data; boundary=b0undary"


def part(name: str, value: bytes, more: str = "") -> bytes:
    head = f'--b0undary\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + value + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--b0undary--\r\n"


FILE = part("file", b"RIFF\r\n--b0undar\r\nmodel", '; filename="a.wav"\r\nContent-Type: audio/wav')
LANGUAGE = part("language", b"m")


async def chunks_of(body: bytes, at: int):
    yield body[:at]
    yield body[at:]


def read(body: bytes, kind=KIND):
    """The name that was found, and the bytes it was found in."""
    named = read_form(body, kind).model
    return None if named is None else (named.model, body[named.start : named.end])


@given(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1), st.binary())
def test_the_name_is_found_whatever_stands_around_it(name, content):
    assume(b"b0undary" not in content)
    file = part("file", content, '; filename="model"\r\nContent-Type: audio/wav')
    body = form(LANGUAGE, file, part("model", name.encode()), part("prompt", b"model"), part("model", b"n"))
    assert read(body) == (name, name.encode())
    assert read_form(body, KIND).names == ["language", "file", "model", "prompt", "model"]


@pytest.mark.parametrize("parts", [[], [FILE], [part("model", b"")], [part("models", b"m"), FILE]])
def test_a_form_without_a_name(parts):
    assert read(form(*parts)) is None
    assert read(form(*parts).removesuffix(b"\r\n")) is None
    assert read(form(*parts) + b"\r\n") is None  # as Ruby's multipart-post ends one


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (form(FILE), "multipart/form-data", "needs one boundary"),
        (form(FILE), "multipart/form-data; boundary=" + "x" * 500, "needs one boundary"),
        (form(FILE), f"{KIND}; boundary=other", "needs one boundary"),
        (form(FILE), f"{KIND};" * 5000, "needs one boundary"),
        (b"no form", KIND, "no multipart form"),
        (b"", KIND, "no multipart form"),
        (form(part("model", b"\xff")), KIND, "not UTF-8"),
        (form(part("model", b"x" * 2000)), KIND, "longer than a name"),
        (form(*[part("a", b"b")] * 2000), KIND, "more than 1024 fields"),
    ],
)
def test_what_is_no_form_is_the_clients_fault(body, kind, said):
    with pytest.raises(BadRequest, match=said):
        read(body, kind=kind)


@pytest.mark.parametrize(
    "body",
    [
        form(FILE).replace(b"\r\n", b"\n"),
        b"a preamble\r\n" + form(FILE),
        form(FILE) + b"an epilogue",
        form(FILE) + part("file_id", b"x"),
        form(FILE).removesuffix(b"--\r\n"),
        form(part("a", b'b\n--b0undary\nContent-Disposition: form-data; name="file_id"\n\nx')),
        form(part("a", b"b--b0undary")),
        form(part("a", b"b").replace(b"--b0undary", b"--b0undary ")),
        form(part("a", b"b").replace(b'"a"', b'"a"\n; name="file_id"')),
        form(part("a", b"b").replace(b'"a"', b'"a"\r; name="file_id"')),
        form(b"--b0undary\r\nContent-Disposition: form-data; name=a\r\n"),
        form(part("a" * 9000, b"b")),
        form(part("a", b"b").replace(b'name="a"', b'name*0="file"; NAME*1="_id"')),
        form(part("model", b"m").replace(b"Disposition", b"Dispositon")),
        form(part("model", b"m").replace(b"\r\n\r\n", b"\r\nContent-Disposition: form-data\r\n\r\n")),
        form(part("model", b"m").replace(b"form-data;", b"form-data; name=x;")),
        form(part("model", b"m", '; filename="f"')),
        form(part("model", b"m").replace(b'"model"', b'model"')),
        form(part("a", b"b").replace(b"; name", b";\r\n name")),
        form(part("a", b"b").replace(b"form-data", b"form\0data")),
    ],
)
def test_a_form_that_servers_may_read_in_another_way_is_refused(body):
    with pytest.raises(BadRequest, match="no multipart form, or an unusual one"):
        read(body)


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
        response = await send(world, chunks_of(body, 9) if is_chunked else body)
        assert response.headers["x-kvpin-engine"] == engine.id
        exchange = engine.seen[-1]
        assert exchange.body == body
        assert world.proxy.last.model == name.decode()


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_in_place_of_an_alias_stands_the_engines_own_name(world, is_chunked):
    body = form(LANGUAGE, FILE, part("model", b"bar"), part("prompt", b"bar"))
    await send(world, chunks_of(body, 9) if is_chunked else body)
    assert world.b.seen[-1].body == body.replace(b"\r\n\r\nbar", b"\r\n\r\nn", 1)


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
        answer = await world.post(route, content=b"RIFF", headers={"content-type": "audio/wav"})
        assert (answer.status_code, world.b.seen[-1].body) == (200, b"RIFF")


async def test_a_form_too_long_before_its_model_is_a_413(world):
    body = form(part("file", bytes(5 << 20)), part("model", b"n"))
    assert is_openai_error(await send(world, chunks_of(body, 9)), 413, "body_too_large")
    assert world.a.seen == world.b.seen == []


BEGUN = post(PATH, b"", f"content-type: {KIND}").replace(b"content-length: 0", b"content-length: 9999") + FILE


async def test_a_client_that_leaves_before_its_model_leaves_nothing_behind(world):
    _, writer = await connect_to(world.proxy)
    writer.write(BEGUN)
    await asyncio.sleep(0.05)
    writer.close()
    assert (await send(world, form(part("model", b"n")))).status_code == 200


async def test_where_the_name_decides_nothing_a_form_is_not_read_ahead(engine, proxy):
    """Its engine has the beginning before the client has sent the rest."""

    async def script(exchange):
        await exchange.receive(b"model")
        await exchange.send({"text": "ok"})

    script.reads_body = False
    engine.script = script
    reader, writer = await connect_to(proxy)
    writer.write(BEGUN)
    assert b'"ok"' in await asyncio.wait_for(reader.readuntil(b"}"), 5)
    writer.close()


async def test_a_form_that_is_read_counts_as_memory_for_bodies(world):
    world.proxy.bodies.limit = 1 << 20
    body = form(part("file", bytes(2 << 20)), part("model", b"n"))
    assert is_openai_error(await send(world, body), 503, "overloaded")
    assert not world.b.seen
    assert world.proxy.bodies.used == 0
