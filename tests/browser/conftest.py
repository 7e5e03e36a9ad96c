"""Pages of another origin in a headless Chromium. `scripts/test-browser` installs it and runs these tests."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, async_playwright
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tests.fakes import serving

# Names under `.test` lead to this machine. No page is kept from it: only new browsers do that.
_ARGUMENTS = (
    *("--no-sandbox", "--host-resolver-rules=MAP *.test 127.0.0.1"),
    "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests",
)
# Streams a chat as a web UI does, and notes each event when it is read.
_PAGE = """<!doctype html><title>chat</title><script type="module">
window.events = []
window.stream = async (url, model) => {
  const headers = {"authorization": "Bearer key", "content-type": "application/json", "x-stainless-os": "web"}
  const messages = [{role: "user", content: "Tell me of the sea."}]
  const body = JSON.stringify({model, messages, max_tokens: 16, stream: true})
  const answer = await fetch(`${url}/v1/chat/completions`, {method: "POST", headers, body})
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader()
  for (let text = ""; ;) {
    const {value, done} = await reader.read()
    if (done) return {status: answer.status, engine: answer.headers.get("x-kvpin-engine")}
    text += value
    for (let end; (end = text.indexOf("\\n\\n")) >= 0; text = text.slice(end + 2))
      window.events.push({data: text.slice(6, end), at: performance.now()})
  }
}
window.ask = async (url, model) => {
  const {default: OpenAI} = await import("/openai/index.mjs")
  const options = {apiKey: "key", dangerouslyAllowBrowser: true, maxRetries: 0}
  const client = new OpenAI({baseURL: `${url}/v1`, ...options})
  const messages = [{role: "user", content: "Tell me of the sea."}]
  const chunks = []
  const stream = await client.chat.completions.create({model, messages, max_tokens: 16, stream: true})
  for await (const chunk of stream) chunks.push(chunk.choices[0]?.delta?.content ?? "")
  return chunks
}
</script>"""


async def _page(_request) -> HTMLResponse:
    return HTMLResponse(_PAGE)


@pytest.fixture
async def origin() -> AsyncIterator[str]:
    """The origin of the pages: another port is another origin."""
    sdk = StaticFiles(directory=os.environ["OPENAI_NODE"])
    async with serving(Starlette(routes=[Route("/", _page), Mount("/openai", sdk)])) as url:
        yield url


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    chromium, libraries = os.environ["CHROMIUM"], os.environ.get("CHROMIUM_LIBRARIES", "")
    env = {**os.environ, "LD_LIBRARY_PATH": libraries} if libraries else dict(os.environ)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=Path(chromium), env=env, args=_ARGUMENTS, timeout=120_000
        )
        yield browser
        await browser.close()


@pytest.fixture
async def page(browser, origin) -> Page:
    """A page of `origin`."""
    page = await browser.new_page()
    await page.goto(origin)
    await page.wait_for_function("() => window.ask !== undefined")
    return page
