"""The page as files: what is served, how, and what it may do in a browser."""

import re
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from engine_adapter import HttpTransport
from proxy.api.page import WebPage
from proxy.server.app import Proxy, build_app
from proxy.settings import load_settings
from tests.fakes import serving

ROOT = Path(__file__).parents[3]
STATIC = ROOT / "proxy" / "api" / "static"
FILES = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def client():
    transport = httpx.ASGITransport(Starlette(routes=WebPage().routes()))
    return httpx.AsyncClient(transport=transport, base_url="http://x")


async def test_every_file_is_served_and_may_do_nothing_but_talk_to_kvpin(client):
    assert "index.html" in FILES
    for name in FILES:
        answer = await client.get(f"/ui/{name}")
        assert (answer.status_code, answer.content) == (200, (STATIC / name).read_bytes())
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = dict(each.split(" ", 1) for each in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
        assert {policy[kind] for kind in ("script-src", "style-src", "connect-src")} == {"'self'"}


@pytest.mark.parametrize("name", ["nothing.js", "../page.py", "%2e%2e/page.py", "vendor", "/etc/passwd"])
async def test_no_other_file_is(client, name):
    assert (await client.get(f"/ui/{name}")).status_code == 404


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("vendor/")])
def test_it_names_nothing_of_another_origin_and_no_absolute_path(name):
    text = (STATIC / name).read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?://", text)
    assert not re.search(r"""(?:src|href|from|url)[=( ]+["']?/""", text)
    assert "innerHTML" not in text


async def test_the_setting_turns_it_off():
    for is_on in (True, False):
        proxy = Proxy(load_settings(ui=is_on), HttpTransport())
        try:
            async with serving(build_app(proxy)) as url, httpx.AsyncClient(base_url=url) as client:
                assert (await client.get("/ui/")).status_code == (200 if is_on else 404)
                browser = await client.get("/", headers={"accept": "text/html,*/*"})
                assert browser.status_code == (307 if is_on else 200)
                assert browser.headers.get("location") == ("ui/" if is_on else None)
                assert ("/ui/" in (await client.get("/")).text) is is_on
        finally:
            await proxy.stop()
