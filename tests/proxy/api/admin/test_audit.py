from structlog.testing import capture_logs

from proxy.api.auth import AdminGuard


def actions(entries):
    names = ("method", "path", "status", "peer", "by")
    return [tuple(e[name] for name in names) for e in entries if e["event"] == "admin action"]


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
    flush, *others = actions(entries)
    assert flush[:2] == ("POST", "/admin/v1/flush")
    assert others == [
        ("POST", f"{prefix}/a/drain", 200, "127.0.0.1", "admin_key"),
        ("POST", f"{prefix}/%1b/drain", 401, "127.0.0.1", None),
        ("DELETE", f"{prefix}/b", 401, "127.0.0.1", None),
    ]
    assert "secret" not in str(entries)
    assert "admin-key" not in str(entries)
