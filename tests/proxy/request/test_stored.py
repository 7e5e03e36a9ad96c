"""What a tenant reaches of the objects that an engine keeps for everybody, over real sockets."""

import asyncio
import itertools
import json
import re
from dataclasses import replace

import pytest

from engine_adapter import NATIVE_ROUTES
from engine_adapter.types import RESPONSES_ROUTES
from proxy.errors import Forbidden
from proxy.request.calls import PROMPT_ROUTES
from proxy.request.engine_errors import PASSED_ON
from proxy.request.known_routes import check_route
from tests.fakes import CHAT, FakeEngine, client_of, connect_to, is_openai_error, proxy_over
from tests.proxy.request.objects_world import COLLECTIONS, FORMS, KEYS, REFUSED, TENANTS, Objects, make


@pytest.fixture
def objects():
    return Objects()


@pytest.fixture
async def engine(objects):
    async with FakeEngine("a", objects) as engine:
        yield engine


@pytest.fixture
def proxy_options():
    return {"tenants": TENANTS}


@pytest.mark.parametrize(("owner", "other"), ["ab", "ba"])
async def test_nothing_of_another_tenant_is_listed_read_or_deleted(client, objects, owner, other):
    """Before, 27 of 27."""
    reached = []
    for collection in COLLECTIONS:
        name = await make(client, owner) if collection == "responses" else objects.make(collection)["id"]
        own = f"/v1/{collection}/{name}"
        listed = await client.get(f"/v1/{collection}", headers=KEYS[other])
        read, gone = [await client.request(method, own, headers=KEYS[other]) for method in ("GET", "DELETE")]
        reached += [(collection, "list")] * (name in listed.text)
        reached += [(collection, "read")] * (read.status_code == 200)
        reached += [(collection, "delete")] * (gone.status_code == 200 or own not in objects.kept)
    assert reached == []


@pytest.mark.parametrize("collection", REFUSED)
async def test_routes_that_keep_objects_are_refused(client, engine, collection):
    """Also to who could have made them."""
    for method, below in (("POST", ""), ("GET", ""), ("GET", "/x"), ("DELETE", "/x"), ("POST", "/x/runs")):
        path = f"/v1/{collection}{below}"
        answer = await client.request(method, f"{path}?model=m", headers=KEYS["a"])
        assert is_openai_error(answer, 403, "forbidden", None)
        assert answer.json()["error"]["message"].startswith(f"kvpin refuses {method} {path}: its API keys")
    assert not engine.seen


async def test_of_its_own_responses_a_tenant_reaches_all(client, objects):
    name = await make(client, "a")
    path = f"/v1/responses/{name}"
    for below in ("", "?x=1", "/", "/input_items"):
        assert (await client.get(f"{path}{below}", headers=KEYS["a"])).json()["id"] == name
    assert (await client.head(path, headers=KEYS["a"])).status_code == 200
    assert (await client.post(f"{path}/cancel", headers=KEYS["a"])).status_code == 200
    body = {"model": "m", "input": "on", "previous_response_id": name}
    for _ in range(2):
        assert (await client.post("/v1/responses", json=body, headers=KEYS["a"])).status_code == 200
    assert (await client.delete(path, headers=KEYS["a"])).json()["deleted"] is True
    assert is_openai_error(await client.get(path, headers=KEYS["a"]), 404, param=None)


async def test_another_tenants_response_is_as_one_that_never_was(client, engine):
    name = await make(client, "a")
    n_seen = len(engine.seen)
    for method, below in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        theirs, nobodys = [
            await client.request(method, f"/v1/responses/{each}{below}", headers=KEYS["b"])
            for each in (name, "x-none")
        ]
        assert is_openai_error(theirs, 404)
        assert theirs.text.replace(name, "ID") == nobodys.text.replace("x-none", "ID")
    body = {"model": "m", "input": "on", "previous_response_id": name}
    stolen = await client.post("/v1/responses", json=body, headers=KEYS["b"])
    assert is_openai_error(stolen, 404, "previous_response_not_found", "previous_response_id")
    assert len(engine.seen) == n_seen


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/new"), ("GET", "/v1/chat/completions"), ("GET", "/v1/chat/completions/X"),
        ("GET", "/slots"), ("PATCH", "/v1/responses/X"), ("GET", "/v1/responses"), ("HEAD", "/v1/responses"),
        ("DELETE", "/v1/responses"), ("POST", "/v1/responses/X"), ("GET", "/v1/responses/X/Y"),
        ("GET", "/v1/responses/X/input_items/Y"), ("GET", "/v1/files?x=/v1/responses/X"),
        ("GET", "/v1/loads"), ("POST", "/v1/{}"), ("GET", "/v1/responses?limit=1"),
    ],
)  # fmt: skip
async def test_any_other_route_is_refused(client, engine, method, path):
    answer = await client.request(method, path, headers=KEYS["a"])
    assert answer.status_code == 403
    assert not engine.seen


@pytest.mark.parametrize("path", ["/v1/video", "/v1/files/a", "/v1/file"])
async def test_no_hint_leads_to_a_route_that_is_refused(client, path):
    answer = await client.get(path, headers=KEYS["a"])
    assert "did you mean" not in answer.json()["error"]["message"]


def test_which_routes_of_adapters_are_refused():
    """A new route of an adapter stands here, or in the table of open ones. WebSockets are refused by
    themselves."""
    refused = set()
    for path, native in NATIVE_ROUTES.items():
        try:
            check_route(native.method, native.same_as or path)
        except Forbidden:
            refused.add(native.same_as or path)
    refused = {path for path in refused if not path.startswith("WebSocket ")}
    assert refused == {"/slots", "/models/load", "/v1/models"}  # kvpin itself answers /v1/models
    for route in PROMPT_ROUTES | PASSED_ON:
        if route.removeprefix("/v1/") not in REFUSED:
            check_route("POST", route)


SPELLINGS = [
    "/v1/files/{}", "/v1//files//{}", "/v1/files/{}/", "/v1/%66iles/{}", "/v1/files%2F{}",
    "/v1/files/{}/content", "/v1/files/x/../{}", "/v1/files/%2e%2e/files/{}", "/v1/files/x%2f%2e%2e%2f{}",
    "/v1/v1/files/{}", "/v1//v1/files/{}", "/v1/files/{};x", "/v1/files;x/{}", "/v1/files/%25{}",
    "/V1/files/{}", "/v1/FILES/{}", "/v1/files/{}?model=m", "/v1/files?file_id={}",
    "/v1/files?file_id=x&file_id={}&model=m", "//v1/files/{}", "/v1/files/\\{}", "/v1/unknown/{}",
    "/v1/files/{}/content/", "/v1/chat/completions/../../files/{}", "/v1/responses/%2e%2e%2ffiles%2f{}",
    "/v1/videos/{}", "http://x/v1/files/{}", "/v1/files/%252e%252e/{}",
]  # fmt: skip
METHODS = ["GET", "HEAD", "DELETE", "POST", "PUT", "PATCH", "TRACE", "PROPFIND", "get", "Delete"]


@pytest.mark.parametrize("target", SPELLINGS)
async def test_no_spelling_reaches_it(client, proxy, engine, objects, target):
    name = await make(client, "a")
    objects.kept[f"/v1/files/{name}"] = {"id": name}
    n_seen = len(engine.seen)
    for method, each in itertools.product(METHODS, (target, target.replace("files", "responses"))):
        reader, writer = await connect_to(proxy)
        lines = [f"{method} {each.format(name)} HTTP/1.1", "host: localhost", "authorization: Bearer key-b"]
        writer.write("\r\n".join([*lines, "content-length: 2", "connection: close", "", "{}"]).encode())
        head = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        assert head.split(b" ")[1] in {b"400", b"403", b"404", b"405"}, head
    assert len(engine.seen) == n_seen
    assert {f"/v1/files/{name}", f"/v1/responses/{name}"} <= objects.kept.keys()


BODIES = [
    (CHAT, "file_id", {"messages": [{"content": [{"type": "file", "file": {"file_id": "ID"}}]}]}),
    ("/v1/completions", "file_ids", {"prompt": "x", "file_ids": [1, "ID"]}),
    ("/v1/responses", "file_id", {"input": [{"content": [{"type": "input_file", "file_id": "ID"}]}]}),
    ("/v1/responses", "conversation", {"input": "x", "conversation": "ID"}),
    ("/v1/responses", "conversation", {"input": "x", "conversation": {"id": "ID"}}),
    ("/v1/responses", "vector_store_ids", {"tools": [{"type": "file_search", "vector_store_ids": ["ID"]}]}),
    ("/v1/responses", "vector_store_id", {"input": "x", "tools": [{"vector_store_id": "ID"}]}),
    ("/v1/responses", "container", {"tools": [{"type": "code_interpreter", "container": "ID"}]}),
    ("/v1/responses", "container_id", {"input": "x", "container_id": "ID"}),
    ("/v1/responses", "previous_response_id", {"input": [{"x": {"previous_response_id": "ID"}}]}),
    ("/v1//responses/x/cancel", "previous_response_id", {"previous_response_id": "ID"}),
    (CHAT, "previous_response_id", {"messages": [], "previous_response_id": "ID"}),
    (CHAT, "part_ids", {"messages": [], "part_ids": ["ID"]}),
    ("/v1/embeddings?file_id=ID", "file_id", {"input": "x"}),
    ("/v1/embeddings?x=1&conversat%69on=ID", "conversation", {"input": "x"}),
    ("/v1/messages", "container", {"messages": [], "max_tokens": 1, "container": {"id": "ID"}}),
    ("/v1/images/edits", "file_id", {"prompt": "x", "images": [{"file_id": "ID"}]}),
    ("/v1/images/edits", "video", {"prompt": "x", "video": {"id": "ID"}}),
    ("/v1/responses", "prompt", {"input": "x", "prompt": {"id": "ID"}}),
    (CHAT, "audio", {"messages": [{"role": "assistant", "audio": {"id": "ID"}}]}),
    ("/v1/audio/speech", "voice", {"input": "x", "voice": {"id": "ID"}}),
    ("/v1/responses", "skill_id", {"input": "x", "tools": [{"type": "shell", "skill_id": "ID"}]}),
    ("/v1/responses", "input", {"input": [{"type": "item_reference", "id": "ID", "more": 1}]}),
    ("/v1/responses", "input", {"input": [None, {"id": "ID"}]}),
]  # fmt: skip


def as_json(value, name, *, escaped):
    """JSON in which ID is that name; every letter of a field may be escaped."""

    def escape(field):
        return '"' + "".join(f"\\u{ord(letter):04x}" for letter in field[1]) + '":'

    text = json.dumps(value).replace("ID", name)
    return re.sub(r'"(\w+)":', escape, text) if escaped else text


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize(("route", "field", "body"), BODIES)
async def test_what_engines_keep_is_named_in_no_field(client, engine, route, field, body, escaped):
    """Not even the tenant's own response, but to go on from it."""
    name = await make(client, "a")
    content = as_json({"model": "m", **body}, name, escaped=escaped)
    for key in KEYS.values():
        answer = await client.post(route.replace("ID", name), content=content, headers=key)
        assert answer.status_code == 403
        assert answer.json()["error"].get("param", field) == field  # Anthropic's have none
        assert answer.json()["error"]["message"].startswith(f"{field!r} names what an engine keeps: ")
    assert len(engine.seen) == 1


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


@pytest.mark.parametrize("field", ["file_id", "images[][file_id]", "input_reference.file_id", "video[id]"])
async def test_a_form_names_nothing(client, proxy, engine, field):
    files = {"file": ("x.txt", b"x" * 300_000), field: (None, "x")}
    for models in ({}, {"alias": "m"}):
        proxy.fleet.aliases = models
        answer = await client.post(FORMS, files=files, headers=KEYS["a"])
        assert is_openai_error(answer, 403, "forbidden", field)
    assert not engine.seen


@pytest.mark.parametrize("field", ["vllm_xargs", "kv_transfer_params[a]", "request_id", "priority"])
async def test_a_form_has_no_field_between_servers(client, engine, field):
    form = {"file": ("x.txt", b"x"), field: (None, '{"kv_transfer_params": "x"}')}
    answer = await client.post("/v1/audio/transcriptions", files=form, headers=KEYS["a"])
    assert is_openai_error(answer, 400, param=field)
    assert "is a field between servers" in answer.text
    assert not engine.seen


@pytest.mark.parametrize("aliases", [{}, {"alias": "m"}], ids=["passed on as it comes", "read whole"])
async def test_a_form_that_only_holds_such_a_word_passes(client, proxy, engine, aliases):
    proxy.fleet.aliases = aliases
    form = {"file": ("x", b'name="file_id"\r\n' * 3000), "purpose": (None, "file_id"), "model": (None, "m")}
    assert (await client.post(FORMS, files=form, headers=KEYS["a"])).status_code == 200
    assert engine.seen[-1].body.count(b"file_id") == 3001


@pytest.mark.parametrize(
    ("name", "kinds", "status"),
    [
        (b'name="a"; filename="file_id"', ["multipart/form-data; boundary=x"], 200),
        (b'name="a"; name="file_id"', ["multipart/form-data; boundary=x"], 403),
        (b'name="file_id"; name="a"', ["multipart/mixed; boundary=x"], 403),
        (b"name*=utf-8''file%5Fid", ["multipart/form-data; boundary=x"], 403),
        (b'NAME = "file\\_id"', ["multipart/form-data; boundary=x"], 403),
        (b'name\xa0=\x1f"file_id"', ["multipart/form-data; boundary=x"], 403),
        (b"name=file_id\xa0", ["multipart/form-data; boundary=x"], 403),
        (b'name="+AGYAaQBsAGUAXwBpAGQ-"', ["multipart/form-data; charset=utf-7; boundary=x"], 400),
        (b'name="a"', ["multipart/form-data; charset=UTF-8; boundary=x"], 200),
        (b'name="a"', ["multipart/form-data; boundary=x; BOUNDARY =y"], 400),
        (b'name="a"', ["multipart/form-data"], 400),
        (b'name="a"', ["multipart/form-data; boundary=x; boundary=y"], 400),
        (b'name="a"', ["audio/wav", "multipart/form-data; boundary=x"], 400),
    ],
)
async def test_a_form_that_servers_may_read_in_two_ways(client, engine, name, kinds, status):
    form = b"--x\r\nContent-Disposition: form-data; %b\r\n\r\nv\r\n--x--\r\n" % name
    headers = [*KEYS["a"].items(), *(("content-type", kind) for kind in kinds)]
    answer = await client.post(FORMS, content=form, headers=headers)
    assert answer.status_code == status
    assert len(engine.seen) == (status == 200)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
async def test_engines_that_get_chats_leave_items_and_responses_to_kvpin(client, proxy, fields, param):
    info = proxy.fleet.engines["a"].info
    proxy.fleet.engines["a"].info = replace(info, served_as_chats=RESPONSES_ROUTES)
    answer = await client.post("/v1/responses", json={"model": "m", **fields}, headers=KEYS["a"])
    assert is_openai_error(answer, 404, param=param)


async def test_with_one_tenant_nothing_changes(engine, objects):
    async with proxy_over(engine) as proxy, client_of(proxy) as client:
        for collection in COLLECTIONS:
            name = objects.make(collection)["id"]
            listed = await client.get(f"/v1/{collection}?after=x")
            assert (listed.status_code, name in listed.text) == (200, True)
            assert (await client.get(f"/v1/{collection}/{name}")).json()["id"] == name
            assert (await client.delete(f"/v1/{collection}/{name}")).status_code == 200
        body = b'{"model":"m", "messages":[], "file_id":"x","conversation" : "c"}'
        assert (await client.post(CHAT, content=body)).status_code == 200
        assert engine.seen[-1].body == body
