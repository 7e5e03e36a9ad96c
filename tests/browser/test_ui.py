"""The page at /ui/, as an operator uses it, with real engines behind."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Page, expect

from scripts.make_gguf import gguf_path
from tests.live.conftest import ENGINE, Kvpin, running_kvpin
from tests.llama import llama_server

PATIENCE_MS = 60_000
TRACE = Path(__file__).parents[1] / "data" / "traces" / "agents.jsonl.gz"
NASTY = "<img src=x onerror=alert(1)> & <script>alert(2)</script>"
DOCUMENT = " ".join(f"Row {number} holds {number * 7} stones." for number in range(40))
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def kvpin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kvpin]:
    """Two engines; with a key for clients and one for operators."""
    keys = ("--api-key", "client-key", "--admin-key", "admin-key")
    with running_kvpin(
        tmp_path_factory.mktemp("ui") / "log", "--managed", ENGINE, "--managed", ENGINE, *keys
    ) as kvpin:
        yield kvpin


@pytest.fixture
async def page(browser) -> Page:
    """An empty page, which fails its test for any error in it."""
    page, errors = await browser.new_page(), []
    page.set_default_timeout(PATIENCE_MS)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(dialog.message))
    page.on("console", lambda line: errors.append(line.text) if line.type in ("error", "warning") else None)
    yield page
    assert [error for error in errors if not error.startswith("Failed to load resource")] == []  # 401, 404


@pytest.fixture
async def opened(page, kvpin) -> Page:
    """The page, with the admin key."""
    await page.goto(kvpin.url)
    await page.get_by_label("admin key").fill("admin-key")
    await page.keyboard.press("Enter")
    await expect(page.locator("article.engine")).to_have_count(2)
    return page


async def ask(kvpin: Kvpin, text: str, **fields) -> httpx.Response:
    headers = {"authorization": "Bearer client-key"}
    body = {"model": "kvpin-tiny", "max_tokens": 4, "messages": [{"role": "user", "content": text}], **fields}
    async with httpx.AsyncClient(headers=headers, timeout=60, trust_env=False) as client:
        return (await client.post(f"{kvpin.base_url}/chat/completions", json=body)).raise_for_status()


async def test_it_asks_for_the_key_and_keeps_it_in_this_tab(page, kvpin):
    await page.goto(kvpin.url)
    assert page.url == f"{kvpin.url}/ui/"
    key = page.get_by_label("admin key")
    await key.fill("wrong")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_contain_text("needs the admin key")
    await key.fill("admin-key")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("status")).to_contain_text("live")
    await page.reload()
    await expect(page.locator("article.engine")).to_have_count(2)
    assert await page.evaluate("localStorage.length + document.cookie.length") == 0


@pytest.mark.parametrize("error", ["the engine left", {"message": "the engine left"}])
async def test_an_error_is_told_in_kvpins_words(opened, error):
    answer = json.dumps({"error": error})
    await opened.route("**/admin/v1/broken", lambda route: route.fulfill(status=502, body=answer))
    told = "import('./api.js').then(({ admin }) => admin('broken')).catch((error) => error.message)"
    assert await opened.evaluate(told) == "the engine left"


async def test_a_request_is_seen_as_it_passes(opened, kvpin):
    answer = await ask(kvpin, DOCUMENT)
    row = opened.locator("tbody tr").filter(has_text=answer.headers["x-request-id"])
    await expect(row).to_contain_text(answer.headers["x-kvpin-engine"])
    await expect(row).to_contain_text("200")
    await expect(opened.get_by_role("img", name=re.compile("delivered: "))).to_be_visible()


async def test_a_chat_streams_and_each_turn_says_what_its_cache_did(opened):
    await opened.get_by_role("link", name="Try", exact=True).click()
    await opened.get_by_label("API key").fill("client-key")
    await opened.wait_for_timeout(1500)  # events come meanwhile, and leave the field alone
    await opened.get_by_role("button", name="Use it").click()
    await expect(opened.get_by_label("model")).to_have_value("kvpin-tiny")
    await opened.evaluate(
        """() => {
          window.lengths = new Set()
          const answer = () => document.querySelector('.turn.assistant .text')
          const changes = {subtree: true, childList: true, characterData: true}
          const look = () => window.lengths.add(answer()?.textContent.length)
          new MutationObserver(look).observe(document.body, changes)
        }"""
    )
    for turn, question in enumerate((f"{NASTY} {DOCUMENT}", "And of the hills?")):
        await opened.get_by_label("Prompt").fill(question)
        await opened.keyboard.press("Enter")
        await expect(opened.get_by_role("link", name="Why?")).to_have_count(turn + 1)
    assert len(await opened.evaluate("[...window.lengths]")) > 5  # the answer grew before it was complete
    await expect(opened.locator(".turn.user").first).to_contain_text(NASTY)
    last = opened.locator(".turn.assistant").last
    assert re.search(r"engine\s*embedded-\d", await last.inner_text())
    cached, total = map(int, re.search(r"([\d,]+) of ([\d,]+)", await last.inner_text()).groups())
    assert 0 < cached < total
    await last.get_by_role("link", name="Why?").click()
    await expect(opened.locator(".lead")).to_contain_text(f"reused {cached} of {total} tokens")
    await expect(opened.locator(".costs li")).to_have_count(2)
    await expect(opened.locator(".costs li.chosen .measured")).to_have_count(1)


async def test_reuse_on_and_off_side_by_side(opened, kvpin):
    await opened.evaluate("sessionStorage.setItem('kvpin-client-key', 'client-key')")
    await opened.get_by_role("link", name="Try", exact=True).click()
    await opened.get_by_label("compare with reuse off").check()
    await expect(opened.get_by_label("model")).to_have_value("kvpin-tiny")
    await opened.get_by_label("at most").fill("8")
    for turn, question in enumerate((f"Side by side. {DOCUMENT}", "And then?")):
        await opened.get_by_label("Prompt").fill(question)
        await opened.keyboard.press("Enter")
        await expect(opened.get_by_role("link", name="Why?")).to_have_count(2 * turn + 2)
    cached = []
    for name in ("Reuse on", "Reuse off"):
        column = opened.get_by_role("group", name=name)
        await expect(column.locator(".turn.assistant")).to_have_count(2)
        facts = await column.locator(".turn.assistant").last.inner_text()
        cached.append(int(re.search(r"([\d,]+) of [\d,]+", facts)[1].replace(",", "")))
    assert cached[0] > 0
    assert cached[1] == 0


async def test_requests_from_before_it_was_opened_are_there(page, kvpin):
    early = await ask(kvpin, "Who was here before?")
    await page.goto(kvpin.url)
    await page.get_by_label("admin key").fill("admin-key")
    await page.keyboard.press("Enter")
    row = page.locator("tbody tr").filter(has_text=early.headers["x-request-id"])
    await expect(row).to_contain_text("first_seen")


async def test_another_question_is_no_miss_and_its_time_is_told_in_parts(opened, kvpin):
    for question in ("Which holds seven?", "Name row 12."):
        answer = await ask(kvpin, f"{DOCUMENT} No miss. {question}", stream=True)
    await opened.get_by_role("link", name="Why", exact=True).click()
    await opened.get_by_role("searchbox").fill(answer.headers["x-request-id"])
    cell = opened.locator("tbody td", has_text="shared_prefix")
    await expect(cell).to_have_class("")
    await opened.locator("tbody a").click()
    parts = opened.get_by_role("region", name="Where the time went")
    for name in ("read", "tokenise", "place", "engine"):
        await expect(parts.get_by_role("img", name=f"{name}: ")).to_be_visible()


async def test_the_use_of_tenants_is_listed(opened, kvpin):
    await ask(kvpin, "Who used what?")
    await opened.get_by_role("link", name="Use", exact=True).click()
    row = opened.get_by_role("region", name="Use of tenants").locator("tbody tr").first
    await expect(row).to_contain_text("kvpin-tiny")
    await expect(row.locator("td").nth(3)).not_to_have_text("0")


async def test_a_miss_is_explained(opened, kvpin):
    await ask(kvpin, f"{DOCUMENT} The first question. {NASTY}")
    other = await ask(kvpin, f"{DOCUMENT} Another one. {NASTY}", stream=True)
    await opened.get_by_role("link", name="Why", exact=True).click()
    await opened.get_by_role("searchbox").fill(other.headers["x-request-id"])
    await opened.locator("tbody a").click()
    await expect(opened.locator(".sides pre").first).to_contain_text("Another")
    await expect(opened.locator(".sides pre").last).to_contain_text("first question")
    await expect(opened.locator("article code")).to_contain_text("messages")
    await expect(opened.locator("img")).to_have_count(0)


async def test_the_cache_map_shows_what_prompts_share_and_its_buttons_work(opened, kvpin):
    document = " ".join(f"Shelf {number} holds {number * 3} boxes." for number in range(60))
    for question in ("Which holds most?", "Which holds least?"):
        answer = await ask(kvpin, f"{document} {question}")
    await opened.get_by_role("link", name="Map", exact=True).click()
    shared = opened.get_by_role("button", name=re.compile("2 requests, from token 0"))
    await shared.first.click()
    details = opened.get_by_role("article", name="The chosen prefix")
    await expect(details).to_contain_text(answer.headers["x-kvpin-engine"])
    await details.get_by_role("button", name="Pin for an hour").click()
    await expect(details.get_by_role("status")).to_contain_text("pin: done")
    await expect(details.locator(".chip")).to_have_text("pinned")
    await expect(opened.get_by_role("button", name=re.compile("from token 0 .*, pinned"))).to_have_count(1)
    await details.get_by_role("button", name="Unpin").click()
    await expect(details.get_by_role("status")).to_contain_text("unpin: done")
    await expect(details.locator(".chip")).to_have_count(0)
    await details.get_by_role("button", name="Flush").click()
    await details.get_by_role("button", name="Really flush?").click()
    await expect(details.get_by_role("status")).to_contain_text("flush: done")
    await expect(details).to_contain_text("No engine is known to hold it any more.")
    await details.get_by_role("button", name="Pin for an hour").click()
    await expect(details).to_contain_text("no engine holds any of it: warm it first")
    await details.get_by_role("button", name="Warm").click()
    await expect(details.get_by_role("status")).to_contain_text("warm: done")


async def test_a_box_of_the_map_has_a_name_and_its_first_words_on_demand(opened, kvpin):
    await ask(kvpin, f"Unheard-of beginnings. {DOCUMENT}", session_id="talk-7")
    await opened.get_by_role("link", name="Map", exact=True).click()
    named = opened.get_by_role("button", name=re.compile("talk-7 · "))
    await expect(named.first).to_be_visible()
    await expect(opened.get_by_text("Unheard-of")).to_have_count(0)
    await opened.get_by_label("first words").check()
    await expect(opened.get_by_role("button", name=re.compile("Unheard-of"))).not_to_have_count(0)


async def test_the_slots_of_a_llama_server_and_who_holds_them(page, monkeypatch, tmp_path):
    monkeypatch.setenv("LLAMA_SERVER", llama_server())
    command = f"llama-server: -m {gguf_path('tiny')} -np 2 -c 4096 -t 1 --slot-save-path {tmp_path}"
    with running_kvpin(tmp_path / "log", "--engine", command) as kvpin:
        body = {"messages": [{"role": "user", "content": DOCUMENT}], "max_tokens": 2, "session_id": "talk-9"}
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            (await client.post(f"{kvpin.base_url}/chat/completions", json=body)).raise_for_status()
        await page.goto(f"{kvpin.url}/ui/")
        slots = page.get_by_role("region", name="Slots")
        await expect(slots.locator("tbody tr")).to_have_count(2)
        await expect(slots.locator("tbody tr", has_text="talk-9")).to_have_count(1)
        await expect(slots.locator("tbody tr", has_text="empty")).to_have_count(1)
        await expect(slots).to_contain_text(f"in {tmp_path}")
        await slots.get_by_role("link", name="request of").click()
        await expect(page.get_by_role("region", name="Where the time went")).to_contain_text("prefill")


async def test_the_map_goes_by_keyboard_and_zooms(opened, kvpin):
    for question in ("One?", "Two?"):
        await ask(kvpin, f"{DOCUMENT} By keyboard. {question}")
    await opened.get_by_role("link", name="Map", exact=True).click()
    boxes = opened.locator(".box")
    await boxes.first.focus()
    await opened.keyboard.press("ArrowRight")
    second = await boxes.nth(1).get_attribute("aria-label")
    assert await opened.evaluate("document.activeElement.getAttribute('aria-label')") == second
    await opened.keyboard.press("Enter")
    await expect(opened.get_by_role("navigation", name="Zoom").get_by_role("link")).not_to_have_count(1)
    await expect(boxes.first).to_have_attribute("aria-label", second)
    await opened.get_by_role("link", name="all prompts").click()
    await expect(boxes.nth(1)).to_have_attribute("aria-label", second)
    await opened.evaluate("location.hash = 'map/ab'")
    await expect(opened.get_by_role("alert")).to_contain_text("no prompt of the last requests")


async def test_a_recording_is_replayed(opened, tmp_path):
    await opened.get_by_role("link", name="Replay", exact=True).click()
    file = opened.get_by_label("recording", exact=True)
    await file.set_input_files(TRACE)
    await opened.get_by_label("engines", exact=True).fill("1,2")
    await opened.get_by_label("GPU tokens of each").fill("1k")
    await opened.get_by_role("button", name="Replay").click()
    await expect(opened.get_by_role("alert")).to_contain_text("give it more GPU tokens")
    await opened.get_by_label("GPU tokens of each").fill("300k")
    await opened.get_by_role("button", name="Replay").click()
    await expect(opened.locator("figure canvas")).to_have_count(3)
    await expect(opened.locator(".scroll tbody tr")).to_have_count(8)
    await expect(opened.get_by_text("too short to compare policies: 200 requests")).to_be_visible()
    await opened.get_by_role("link", name="Now", exact=True).click()
    await opened.get_by_role("link", name="Replay", exact=True).click()
    await expect(opened.locator("figure canvas")).to_have_count(3)  # it is still there
    await opened.set_viewport_size({"width": 390, "height": 844})
    assert await opened.evaluate("document.documentElement.scrollWidth") <= 390
    await file.set_input_files(TRACE)
    await opened.get_by_label("policies").fill("all")
    await opened.get_by_role("button", name="Replay").click()
    await opened.get_by_role("button", name="Stop").click()
    await expect(opened.get_by_role("progressbar")).to_have_count(0)
    bad = tmp_path / "bad.jsonl"
    bad.write_text(NASTY)
    await file.set_input_files(bad)
    await opened.get_by_role("button", name="Replay").click()
    await expect(opened.get_by_role("alert")).to_contain_text("the recording")


async def test_without_an_admin_key_only_kvpins_own_page_may_change_anything(page, origin, tmp_path):
    with running_kvpin(tmp_path / "log", "--managed", ENGINE) as kvpin:
        await page.goto(origin)  # of this machine, too: another port
        tries = """async url => {
          const flush = url + '/admin/v1/flush'
          const body = '{"all": true}'
          await fetch(flush, {method: 'POST', mode: 'no-cors', body})
          await fetch(url + '/admin/v1/stats', {mode: 'no-cors'})
          const form = document.createElement('form')
          Object.assign(form, {method: 'POST', action: flush, enctype: 'text/plain'})
          document.body.append(form)
          form.submit()
        }"""
        async with page.expect_navigation():
            await page.evaluate(tries, kvpin.url)
        assert "answers only this machine" in await page.locator("body").inner_text()
        await page.goto(f"{kvpin.url}/ui/")
        assert kvpin.admin("GET", "operations").json()["operations"] == []
        lines = [json.loads(line) for line in kvpin.log.read_text().splitlines() if line.startswith("{")]
        assert [each["status"] for each in lines if each["event"] == "admin action"] == [403, 403]
        await page.locator("summary", has_text="KV").click()
        await page.get_by_role("button", name="Flush all").click()
        await page.get_by_role("button", name="Really flush all?").click()
        await expect(page.locator(".operation")).to_contain_text("flush: done")
        assert [each["verb"] for each in kvpin.admin("GET", "operations").json()["operations"]] == ["flush"]


async def test_a_request_that_is_gone_is_said_to_be(opened):
    await opened.evaluate("location.hash = 'why/req-none'")
    await expect(opened.get_by_role("alert")).to_contain_text("no recent request has the id 'req-none'")


async def test_many_engines_and_requests_fill_pages_not_the_browser(page, kvpin):
    """256 engines and 5,000 requests at once."""
    reuse = {
        "prompt_tokens": 10,
        "available_tokens": 9,
        "selected_tokens": 8,
        "delivered_tokens": 7,
        "saved_s": 1.5,
    }
    audit = {
        "checked": 50,
        "exact": 49,
        "unchecked": {"ended early": 3, "prediction not firm": 1200},
    }
    engine = {
        "kind": "vllm", "model": "m",
        "state": "ready", "trust": "precise", "why": "", "audit": audit, "forms": {}, "queue_s": 0.1,
        "in_flight": 1, "decoding": 1, "held_tokens": {"gpu": 5}, "capacity_tokens": {"gpu": 10},
        "reuse": reuse, "last_error": None,
    }  # fmt: skip
    snapshot = {
        "at": 1.0, "reuse_on": True, "requests": 5000, "unshown": 7, "waiting": {"m": 3}, "reuse": reuse,
        "unserved": ["lost"],
        "engines": [{**engine, "id": f"{NASTY}-{number}"} for number in range(256)],
    }  # fmt: skip
    request = {"started": 1.0, "engine": "e", "n_tokens": 10, "status": None, "why": NASTY}
    events = [("snapshot", snapshot)]
    events += [("placed", {**request, "request_id": f"r{number}"}) for number in range(5000)]
    events += [("missed", {"events": 2})]
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)

    async def fulfill(route):
        await route.fulfill(body=body, content_type="text/event-stream")

    await page.route("**/admin/v1/events", fulfill)
    await page.goto(f"{kvpin.url}/ui/")
    await expect(page.locator("article.engine")).to_have_count(24)
    await expect(page.locator("article.engine").first).to_contain_text(
        "exact 49 of 50 checked; 1,203 not checked (prediction not firm: 1,200, ended early: 3)"
    )
    await expect(page.get_by_text("No engine takes requests for lost")).to_be_visible()
    await expect(page.locator("tbody tr")).to_have_count(50)
    await expect(page.locator(".pages")).to_contain_text("1–24 of 256")
    await page.get_by_role("button", name="Next").click()
    await expect(page.locator(".pages")).to_contain_text("25–48 of 256")
    await expect(page.locator("article.engine h3").first).to_contain_text(f"{NASTY}-24")
    await expect(page.locator("img")).to_have_count(0)


async def test_it_says_that_kvpin_is_gone_and_comes_back(page, kvpin):
    await page.route("**/admin/v1/events", lambda route: asyncio.ensure_future(route.abort()))
    await page.goto(f"{kvpin.url}/ui/")
    await expect(page.get_by_role("status")).to_contain_text("connection lost")
    await page.unroute("**/admin/v1/events")
    await expect(page.get_by_label("admin key")).to_be_visible()
