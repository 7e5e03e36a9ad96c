import re

import pytest
from structlog.testing import capture_logs

from proxy.api.admin.mount import PREFIX, RefusalLines
from proxy.api.auth import AdminGuard


async def test_nothing_is_answered_without_the_key(world):
    async with world.client(AdminGuard("admin-key")) as client:
        for endpoint in world.endpoints:
            answer = await client.request(endpoint.method, endpoint.path)
            assert answer.status_code == 401, endpoint.path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert (await client.get("/nowhere")).status_code == 401
        good = await client.get("/stats", headers={"authorization": "Bearer admin-key"})
        assert good.status_code == 200
        assert (await client.get("/stats", headers={"authorization": "Bearer no"})).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/stats/", 404),
        ("GET", "/flush", 405),
        ("DELETE", "/stats", 405),
        ("POST", "/stats", 405),
    ],
)
async def test_routers_refusals_have_the_one_shape(client, method, path, status):
    answer = await client.request(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert f"{method} /admin/v1{path}" in error["message"]


async def test_each_action_is_one_line_without_its_body_and_reading_is_none(world, pair):
    key = {"authorization": "Bearer admin-key"}
    async with world.client(AdminGuard("admin-key")) as client:
        with capture_logs() as entries:
            await client.get("/engines", headers=key)
            await client.post("/flush", json={"prompt": "a secret"}, headers=key)
            await client.post("/engines/a/drain", headers=key)
            await client.post("/engines/%1b/drain", headers={"authorization": "Bearer wrong"})
            await client.delete("/engines/b")
    prefix = "/admin/v1/engines"
    names = ("method", "path", "status", "peer", "by")
    flush, *others = [tuple(e[name] for name in names) for e in entries if e["event"] == "admin action"]
    assert flush[:2] == ("POST", "/admin/v1/flush")
    assert others == [
        ("POST", f"{prefix}/a/drain", 200, "127.0.0.1", "admin_key"),
        ("POST", f"{prefix}/%1b/drain", 401, "127.0.0.1", None),
        ("DELETE", f"{prefix}/b", 401, "127.0.0.1", None),
    ]
    assert "secret" not in str(entries)
    assert "admin-key" not in str(entries)


async def test_of_many_refused_actions_the_log_tells_a_few(world):
    async with world.client(AdminGuard("admin-key")) as client:
        with capture_logs() as entries:
            for _ in range(12):
                assert (await client.post("/flush", json={})).status_code == 401
            await client.post("/engines/a/drain", headers={"authorization": "Bearer admin-key"})
    assert [each["status"] for each in entries if each["event"] == "admin action"] == [401] * 10 + [404]


def test_the_next_line_tells_how_many_were_left_out():
    lines = RefusalLines()
    assert [lines.may_tell(0.0) for _ in range(12)] == [True] * 10 + [False] * 2
    assert (lines.may_tell(59.0), lines.left_out) == (False, 3)
    assert (lines.may_tell(60.0), lines.left_out) == (True, 3)


@pytest.fixture
async def document(client):
    answer = await client.get("/openapi.json")
    assert answer.status_code == 200
    return answer.json()


async def test_references_lead_somewhere(document):
    references = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert references
    assert references <= set(document["components"]["schemas"])


async def test_each_operation_has_a_name_and_its_path_parameters_are_described(document):
    names = [each["operationId"] for methods in document["paths"].values() for each in methods.values()]
    assert len(set(names)) == len(names)
    assert "post_engines_engine_id_drain" in names
    for path, methods in document["paths"].items():
        for operation in methods.values():
            named = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path))


async def test_bodies_say_what_may_stand_in_them(document):
    schemas = document["components"]["schemas"]
    assert schemas["Flush"]["additionalProperties"] is False
    assert schemas["DryRun"]["additionalProperties"] is True
    assert schemas["Flush"]["properties"]["wait_s"]["maximum"] == 60
    taken = document["paths"][f"{PREFIX}/prompt_tables"]["post"]["requestBody"]["content"]
    assert set(taken) == {"application/json", "application/octet-stream"}
