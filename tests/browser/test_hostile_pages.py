"""What any page can do with a kvpin without keys on its user's machine: nothing."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from playwright.async_api import Page

from proxy.api.openai import DataPlane
from tests.fakes import FakeEngine, proxy_over

ASK = """{"model": "m", "messages": [{"role": "user", "content": "spend my money"}]}"""
# What a page can send across origins without asking first, each with the method that arrives.
ATTACKS = {
    "fetch without CORS": (
        "POST",
        """([url, body]) => fetch(url + "/v1/chat/completions", {method: "POST", mode: "no-cors", body})
        .then(answer => answer.type)""",
    ),
    "a form": (
        "POST",
        """([url, body]) => {
          document.body.innerHTML = `<form method="post" enctype="text/plain"><input></form>`
          const form = document.forms[0], field = form.elements[0]
          form.action = url + "/v1/chat/completions"
          field.name = body.slice(0, -1) + `, "x": "`
          field.value = `"}`
          form.submit()
        }""",
    ),
    "a beacon": ("POST", """([url, body]) => navigator.sendBeacon(url + "/v1/chat/completions", body)"""),
    "a picture": ("GET", """([url]) => { new Image().src = url + "/v1/files" }"""),
    "a script": (
        "GET",
        """([url]) => {
          const script = document.createElement("script")
          script.src = url + "/v1/files"
          document.head.append(script)
        }""",
    ),
    "a WebSocket": (
        "GET",
        """([url]) => { new WebSocket(url.replace("http", "ws") + "/v1/realtime?model=m") }""",
    ),
}
READ = """async path => { const answer = await fetch(path); return [answer.status, await answer.text()] }"""


@pytest.fixture
async def engine():
    async with FakeEngine("a") as engine:
        yield engine


@pytest.fixture
async def proxy(engine):
    """A proxy without keys."""
    async with proxy_over(engine) as proxy:
        yield proxy
        await proxy.settled()


@pytest.fixture
def answered(monkeypatch):
    """Method and status of each request of the data plane, as it was answered."""
    seen, serve = asyncio.Queue(), DataPlane.serve

    async def noting(self, exchange):
        await serve(self, exchange)
        seen.put_nowait((exchange.method, exchange.status))

    monkeypatch.setattr(DataPlane, "serve", noting)
    return seen


def named(url: str, name: str) -> str:
    """The same port under another name."""
    return str(httpx.URL(url).copy_with(host=name)).rstrip("/")


async def rebound(browser, proxy) -> Page:
    """A page whose first answer came from its author's machine, and whose name leads to kvpin since then."""
    page, home = await browser.new_page(), named(proxy.url, "evil.test")
    await page.route(f"{home}/", lambda route: route.fulfill(body="<p>", content_type="text/html"))
    await page.goto(f"{home}/")
    return page


@pytest.mark.parametrize("site", ["evil.test", "127.0.0.1"])
@pytest.mark.parametrize(("method", "attack"), ATTACKS.values(), ids=ATTACKS)
async def test_a_page_of_another_origin(engine, proxy, browser, origin, answered, site, method, attack):
    page = await browser.new_page()
    await page.goto(named(origin, site))
    await page.evaluate(attack, [proxy.url, ASK])
    assert await asyncio.wait_for(answered.get(), 30) == (method, 403)
    assert not engine.seen


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/admin/v1/stats"])
async def test_a_page_whose_name_was_rebound_reads_nothing(proxy, browser, path):
    page = await rebound(browser, proxy)
    status, text = await page.evaluate(READ, path)
    assert status in (403, 404)  # the admin API is not served here
    assert "kvpin_" not in text
    assert '"data"' not in text


async def test_nor_does_it_chat(engine, proxy, browser, answered):
    page = await rebound(browser, proxy)
    send = "body => fetch('/v1/chat/completions', {method: 'POST', body}).then(answer => answer.status)"
    assert await page.evaluate(send, ASK) == 403
    assert await answered.get() == ("POST", 403)
    assert not engine.seen


async def test_what_a_person_types_is_shown(proxy, browser):
    page = await browser.new_page()
    assert (await page.goto(f"{proxy.url}/v1/models")).status == 200
    assert (await page.goto(named(f"{proxy.url}/metrics", "localhost"))).status == 200
