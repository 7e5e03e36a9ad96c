"""What a tenant reaches of the objects that an engine keeps for everybody, over real sockets."""

import asyncio
import json
from dataclasses import replace

import pytest

from engine_adapter.types import RESPONSES_ROUTES
from tests.fakes import CHAT, FakeEngine, client_of, connect_to, is_openai_error, proxy_over
from tests.proxy.request.stored.objects_world import FOLLOWED, FOUND, KEYS, REFUSED, TENANTS, Objects, make


@pytest.fixture
def objects():
    return Objects()


@pytest.fixture
async def engine(objects):
    async with FakeEngine("a", objects) as engine:
        yield engine


@pytest.fixture
async def proxy(engine):
    async with proxy_over(engine, tenants=TENANTS) as proxy:
        yield proxy
        await proxy.settled()


@pytest.mark.parametrize(("owner", "other"), ["ab", "ba"])
async def test_nothing_of_another_tenant_is_listed_read_or_deleted(client, objects, owner, other):
    """Before, 27 of 27."""
    reached = []
    for collection in FOUND:
        answer = await client.post(
            f"/v1/{collection}", json={"model": "m", "messages": []}, headers=KEYS[owner]
        )
        name = answer.json()["id"] if answer.status_code == 200 else objects.make(collection)["id"]
        own = f"/v1/{collection}/{name}"
        listed = await client.get(f"/v1/{collection}", headers=KEYS[other])
        read, gone = [await client.request(method, own, headers=KEYS[other]) for method in ("GET", "DELETE")]
        if collection == "chat/completions":
            assert answer.status_code == 200
        reached += [(collection, "list")] * (name in listed.text)
        reached += [(collection, "read")] * (read.status_code == 200)
        reached += [(collection, "delete")] * (gone.status_code == 200 or own not in objects.kept)
    assert reached == []


@pytest.mark.parametrize("collection", FOLLOWED)
async def test_of_its_own_a_tenant_reaches_all(client, objects, collection):
    name = await make(client, "a", collection)
    path = f"/v1/{collection}/{name}"
    if collection != "uploads":
        assert (await client.get(f"{path}?x=1", headers=KEYS["a"])).json()["id"] == name
        assert (await client.head(path, headers=KEYS["a"])).status_code == 200
        assert (await client.get(f"{path}/", headers=KEYS["a"])).json()["id"] == name
        assert (await client.delete(path, headers=KEYS["a"])).json()["deleted"] is True
        assert is_openai_error(await client.get(path, headers=KEYS["a"]), 404, param=None)
    else:
        part = (await client.post(f"{path}/parts", json={"data": "x"}, headers=KEYS["a"])).json()["id"]
        done = await client.post(f"{path}/complete", json={"part_ids": [part]}, headers=KEYS["a"])
        file = done.json()["file"]["id"]
        assert (await client.get(f"/v1/files/{file}/content", headers=KEYS["a"])).json()["id"] == file
        assert is_openai_error(await client.get(f"/v1/files/{file}/content", headers=KEYS["b"]), 404)
        parts = {"part_ids": [part]}
        theirs = f"/v1/uploads/{await make(client, 'b', 'uploads')}/complete"
        assert is_openai_error(
            await client.post(theirs, json=parts, headers=KEYS["b"]), 404, param="part_ids"
        )


async def test_another_tenants_object_is_as_one_that_never_was(client, engine):
    for collection in FOLLOWED:
        name = await make(client, "a", collection)
        n_seen = len(engine.seen)
        method, below = ("POST", "/cancel") if collection == "uploads" else ("GET", "")
        theirs, nobodys = [
            await client.request(method, f"/v1/{collection}/{each}{below}", headers=KEYS["b"])
            for each in (name, "x-none")
        ]
        assert is_openai_error(theirs, 404)
        assert theirs.text.replace(name, "ID") == nobodys.text.replace("x-none", "ID")
        assert len(engine.seen) == n_seen


async def test_what_an_object_makes_is_the_same_tenants(client):
    video = await make(client, "a", "videos")
    remix = await client.post(f"/v1/videos/{video}/remix", json={"prompt": "more"}, headers=KEYS["a"])
    path = f"/v1/videos/{remix.json()['id']}/content"
    assert (await client.get(path, headers=KEYS["a"])).status_code == 200
    assert is_openai_error(await client.get(path, headers=KEYS["b"]), 404)


@pytest.mark.parametrize("collection", FOLLOWED + REFUSED)
async def test_lists_are_nobodys(client, engine, collection):
    for query in ("", "?after=x", "?limit=1&order=asc", "/", "/?model=m"):
        for method in ("GET", "HEAD"):
            answer = await client.request(method, f"/v1/{collection}{query}", headers=KEYS["a"])
            assert answer.status_code == 403
    assert not engine.seen


@pytest.mark.parametrize("collection", sorted({*REFUSED} - {"chat/completions"}))
async def test_what_engines_run_unseen_is_refused(client, engine, collection):
    for method, below in (("POST", ""), ("GET", "/x"), ("DELETE", "/x"), ("POST", "/x/runs")):
        answer = await client.request(method, f"/v1/{collection}{below}", json={}, headers=KEYS["a"])
        assert is_openai_error(answer, 403, "forbidden", None)
        assert f"{method} /v1/{collection}{below}" in answer.text
        assert "several tenants" in answer.text
    assert not engine.seen


SPELLINGS = [
    *(
        "/v1/files/{}",
        "/v1//files//{}",
        "/v1/files/{}/",
        "/v1/%66iles/{}",
        "/v1/files%2F{}",
        "/v1/files/{}/content",
    ),
    *("/v1/files/x/../{}", "/v1/files/%2e%2e/files/{}", "/v1/files/x%2f%2e%2e%2f{}", "/v1/v1/files/{}"),
    *(
        "/v1//v1/files/{}",
        "/v1/files/{};x",
        "/v1/files;x/{}",
        "/v1/files/%25{}",
        "/V1/files/{}",
        "/v1/FILES/{}",
    ),
    *(
        "/v1/files/{}?model=m",
        "/v1/files?file_id={}",
        "/v1/files?file_id=x&file_id={}&model=m",
        "//v1/files/{}",
    ),
    *("/v1/files/\\{}", "/v1/files/{}/content/", "/v1/chat/completions/../../files/{}", "/v1/unknown/{}"),
    *(
        "/v1/responses/%2e%2e%2ffiles%2f{}",
        "/v1/videos/{}",
        "http://x/v1/files/{}",
        "/v1/files/%252e%252e/{}",
    ),
]
METHODS = ["GET", "HEAD", "DELETE", "POST", "PUT", "PATCH", "TRACE", "PROPFIND", "get", "Delete"]


@pytest.mark.parametrize("target", SPELLINGS)
async def test_no_spelling_reaches_it(client, proxy, engine, objects, target):
    name = await make(client, "a", "files")
    n_seen = len(engine.seen)
    for method in METHODS:
        reader, writer = await connect_to(proxy)
        lines = [f"{method} {target.format(name)} HTTP/1.1", "host: localhost", "authorization: Bearer key-b"]
        writer.write("\r\n".join([*lines, "content-length: 2", "connection: close", "", "{}"]).encode())
        head = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        assert head.split(b" ")[1] in {b"400", b"403", b"404", b"405"}, head
    assert len(engine.seen) == n_seen
    assert f"/v1/files/{name}" in objects.kept


async def test_options_ask_no_engine(client, engine):
    assert (await client.options("/v1/files/x", headers=KEYS["b"])).status_code == 204
    assert not engine.seen


BODIES = [
    (CHAT, "files", {"messages": [{"content": [{"type": "file", "file": {"file_id": "ID"}}]}]}),
    ("/v1/completions", "files", {"prompt": "x", "file_ids": ["ID", 1]}),
    ("/v1/responses", "files", {"input": [{"content": [{"type": "input_file", "file_id": "ID"}]}]}),
    ("/v1/responses", "responses", {"input": "x", "previous_response_id": "ID"}),
    ("/v1/responses", "conversations", {"input": "x", "conversation": "ID"}),
    ("/v1/responses", "conversations", {"input": "x", "conversation": {"id": "ID"}}),
    ("/v1/responses", "vector_stores", {"tools": [{"type": "file_search", "vector_store_ids": ["ID"]}]}),
    ("/v1/responses", "containers", {"tools": [{"type": "code_interpreter", "container": "ID"}]}),
    ("/v1//responses/compact", "responses", {"input": "x", "previous_response_id": "ID"}),
    ("/v1/embeddings?file_id=ID", "files", {"input": "x"}),
    ("/v1/messages", "containers", {"messages": [], "max_tokens": 1, "container": {"id": "ID"}}),
    ("/v1/vector_stores", "files", {"file_ids": ["ID"]}),
    ("/v1/containers", "files", {"file_ids": ["ID"]}),
    ("/v1/images/edits", "files", {"prompt": "x", "images": [{"file_id": "ID"}]}),
    ("/v1/videos", "files", {"prompt": "x", "input_reference": {"file_id": "ID"}}),
    ("/v1/videos", "videos", {"prompt": "x", "video": {"id": "ID"}}),
]  # fmt: skip


def as_json(value, name, *, escaped):
    """JSON in which ID is that name; every letter of a field may be escaped."""
    if isinstance(value, dict):
        fields = (
            (
                "".join(f"\\u{ord(c):04x}" for c in field) if escaped else field,
                as_json(inner, name, escaped=escaped),
            )
            for field, inner in value.items()
        )
        return "{" + ", ".join(f'"{field}": {inner}' for field, inner in fields) + "}"
    if isinstance(value, list):
        return f"[{', '.join(as_json(each, name, escaped=escaped) for each in value)}]"
    return json.dumps(value).replace("ID", name)


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize(("route", "collection", "body"), BODIES)
async def test_a_body_names_only_what_is_its_tenants(client, engine, route, collection, body, escaped):
    name = await make(client, "a", collection)
    content = as_json({"model": "m", **body}, name, escaped=escaped)
    n_seen = len(engine.seen)
    theirs = await client.post(route.replace("ID", name), content=content, headers=KEYS["b"])
    assert theirs.status_code == 404, theirs.text
    assert len(engine.seen) == n_seen
    await client.post(route.replace("ID", name), content=content, headers=KEYS["a"])
    assert len(engine.seen) == n_seen + 1


@pytest.mark.parametrize(
    ("route", "body", "what"),
    [
        ("/v1/responses", {"input": "x", "prompt": {"id": "pmpt_1"}}, "prompt"),
        (CHAT, {"messages": [{"role": "assistant", "audio": {"id": "audio_1"}}]}, "audio"),
        ("/v1/audio/speech", {"input": "x", "voice": {"id": "voice_1"}}, "voice"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "shell", "skill_id": "s"}]}, "skill"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_1", "more": 1}]}, "item"),
        ("/v1/responses", {"input": [None, {"id": "msg_1"}]}, "item"),
        ("/v1/conversations", {"items": [{"type": None, "id": "msg_1"}]}, "item"),
    ],
)
async def test_what_is_not_followed_is_refused_in_a_body(client, engine, route, body, what):
    answer = await client.post(route, json={"model": "m", **body}, headers=KEYS["a"])
    assert is_openai_error(answer, 403, "forbidden")
    assert f"names {what}s that an engine keeps" in answer.text
    assert not engine.seen


@pytest.mark.parametrize(
    "body",
    [
        {"metadata": {"conversation": "c", "file_id": "f"}, "messages": []},
        {"messages": [{"role": "user", "content": '"file_id": "f", "conversation": "c"'}]},
        {"messages": [{"content": [{"type": "tool_use", "input": {"file_id": "f"}}]}]},
        {"messages": [{"tool_calls": [{"function": {"arguments": {"container": "c"}}}]}]},
        {"tools": [{"function": {"parameters": {"properties": {"file_id": {"enum": ["f"]}}}}}]},
        {"audio": {"voice": "alloy", "format": "mp3"}, "tools": [{"container": {"type": "auto"}}]},
        {"conversation": None, "file_ids": [], "container": "", "vector_store_ids": [None, 1, {"id": 2}]},
    ],
)
async def test_what_names_nothing_passes(client, engine, body):
    answer = await client.post(CHAT, json={"model": "m", **body}, headers=KEYS["a"])
    assert answer.status_code == 200
    assert engine.seen[-1].json.keys() >= body.keys()


async def test_a_body_that_cannot_be_decoded_is_refused(client, engine):
    content = b'{"model": "m", "messages": [{"file_id": 1e999, "x": "\\ud800"}]}'
    answer = await client.post(CHAT, content=content, headers=KEYS["a"])
    assert is_openai_error(answer, 400)
    assert not engine.seen


async def test_objects_of_two_engines_are_not_named_together(client, proxy, engine):
    mine = [await make(client, "a", "files")]
    async with FakeEngine("b", Objects("other")) as other:
        proxy.add(other)
        while not other.seen:
            mine.append(await make(client, "a", "files"))
        n_seen = len(engine.seen) + len(other.seen)
        answer = await client.post("/v1/vector_stores", json={"file_ids": mine}, headers=KEYS["a"])
        assert is_openai_error(answer, 400)
        assert all(each in answer.text for each in mine[-2:])
        assert len(engine.seen) + len(other.seen) == n_seen
        for name, at in ((mine[0], "a"), (mine[-1], "b")):
            made = await client.post("/v1/vector_stores", json={"file_ids": [name]}, headers=KEYS["a"])
            assert made.headers["x-kvpin-engine"] == at
        await proxy.settled()


@pytest.mark.parametrize("field", ["file_id", "images[][file_id]", "input_reference.file_id", "video[id]"])
async def test_a_form_names_nothing(client, proxy, engine, objects, field):
    files = {"file": ("x.txt", b"x" * 300_000), field: (None, "x")}
    for models in ({}, {"alias": "m"}):
        proxy.fleet.aliases = models
        answer = await client.post("/v1/files", files=files, headers=KEYS["a"])
        assert is_openai_error(answer, 403, "forbidden", field)
    assert not objects.kept
    files = {
        "file": ("x.txt", b'name="file_id"\r\n' * 3000),
        "purpose": (None, "file_id"),
        "model": (None, "m"),
    }
    for models in ({}, {"alias": "m"}):
        proxy.fleet.aliases = models
        answer = await client.post("/v1/files", files=files, headers=KEYS["a"])
        assert answer.status_code == 200
        assert engine.seen[-1].body.count(b"file_id") == 3001


@pytest.mark.parametrize(
    ("name", "kinds", "status"),
    [
        (b'name="purpose"', ["multipart/form-data; boundary=x"], 200),
        (b'name="a"; filename="file_id"', ["multipart/form-data; boundary=x"], 200),
        (b'name="a"; name="file_id"', ["multipart/form-data; boundary=x"], 403),
        (b'name="file_id"; name="a"', ["multipart/mixed; boundary=x"], 403),
        (b"name*=utf-8''file%5Fid", ["multipart/form-data; boundary=x"], 403),
        (b'NAME = "file\\_id"', ["multipart/form-data; boundary=x"], 403),
        (b'name="a"', ["multipart/form-data"], 400),
        (b'name="a"', ["multipart/form-data; boundary=x; boundary=y"], 400),
        (b'name="a"', ["audio/wav", "multipart/form-data; boundary=x"], 400),
    ],
)
async def test_a_form_that_servers_may_read_in_two_ways(client, objects, name, kinds, status):
    form = b"--x\r\nContent-Disposition: form-data; %b\r\n\r\nv\r\n--x--\r\n" % name
    headers = [*KEYS["a"].items(), *(("content-type", kind) for kind in kinds)]
    answer = await client.post("/v1/files", content=form, headers=headers)
    assert answer.status_code == status
    assert len(objects.kept) == (status == 200)


async def test_the_names_of_a_body_are_counted(client, engine):
    answer = await client.post(CHAT, json={"model": "m", "file_ids": ["f"] * 5000}, headers=KEYS["a"])
    assert is_openai_error(answer, 400)
    assert "more than 1024 objects" in answer.text
    assert not engine.seen


async def test_engines_that_get_chats_leave_items_and_responses_to_kvpin(client, proxy, engine):
    info = proxy.fleet.engines["a"].info
    proxy.fleet.engines["a"].info = replace(info, served_as_chats=RESPONSES_ROUTES)
    for input_, field in (
        ([{"type": "item_reference", "id": "msg_1"}], "input[0].id"),
        ("x", "previous_response_id"),
    ):
        body = {"model": "m", "input": input_, **({field: "resp_1"} if isinstance(input_, str) else {})}
        answer = await client.post("/v1/responses", json=body, headers=KEYS["a"])
        assert is_openai_error(answer, 404, param=field)
    assert not engine.seen


async def test_with_one_tenant_nothing_changes(engine, objects):
    async with proxy_over(engine) as proxy, client_of(proxy) as client:
        for collection in FOUND:
            name = objects.make(collection)["id"]
            listed = await client.get(f"/v1/{collection}?after=x")
            assert (listed.status_code, name in listed.text) == (200, True)
            assert (await client.get(f"/v1/{collection}/{name}")).json()["id"] == name
            assert (await client.delete(f"/v1/{collection}/{name}")).status_code == 200
        body = b'{"model":"m", "messages":[], "file_id":"x","conversation" : "c"}'
        assert (await client.post(CHAT, content=body)).status_code == 200
        assert engine.seen[-1].body == body


async def test_names_go_with_their_tenant(client, proxy):
    name = await make(client, "a", "files")
    proxy.flow.preparation.destinations.divide(["b", "c"])
    proxy.flow.preparation.destinations.divide(["a", "b"])
    assert is_openai_error(await client.get(f"/v1/files/{name}", headers=KEYS["a"]), 404)
