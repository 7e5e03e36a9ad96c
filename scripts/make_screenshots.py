"""Makes the pictures of the page, with two embedded engines behind it, and of a report of `kvpin replay`.

scripts/with-chromium .venv/bin/python scripts/make_screenshots.py [FOLDER]
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
from PIL import Image
from playwright.async_api import Browser, Page, async_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.live.conftest import ENGINE, Kvpin, running_kvpin  # noqa: E402 - found by the line before

DESKTOP, PHONE = {"width": 1120, "height": 800}, {"width": 390, "height": 844}
SEEN_S = 20.0
COLORS = 200
SYSTEM = "You keep the stock of four warehouses. " + " ".join(
    f"Rule {n}: count shelf {n} on day {n * n} of the year." for n in range(16)
)
DOCUMENTS = [
    f"Stock of warehouse {house}: " + " ".join(f"shelf {n} holds {n * house} boxes." for n in range(shelves))
    for house, shelves in ((3, 36), (5, 28), (7, 20), (11, 12))
]
ORDERS = "Orders of day {day}: " + " ".join(f"customer {n} wants {{day}}{n} boxes." for n in range(8))
TRACE = ROOT / "tests" / "data" / "traces" / "agents.jsonl.gz"
REPLAY = ("--engines", "4", "--gpu-tokens", "100k,200k,400k,800k", "--load", "0.9")
TALK = (DOCUMENTS[0] + " Which shelf holds the most?", "And the least?")


async def load(kvpin: Kvpin) -> None:
    """Questions about the documents, on several days; some have another beginning."""
    async with httpx.AsyncClient(base_url=kvpin.base_url, timeout=60, trust_env=False) as client:
        for number in range(int(2 * SEEN_S)):
            beginning = "Today: " if number % 9 == 8 else ""  # noqa: PLR2004 - now and then
            document = DOCUMENTS[(number + number // 5) % len(DOCUMENTS)]
            question = f"{beginning}{document} {ORDERS.format(day=number % 11)} Which shelves are empty then?"
            body = {"model": "kvpin-tiny", "max_tokens": 12, "stream": True}
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            await client.post("chat/completions", json={**body, "messages": messages})
            await asyncio.sleep(0.3)


async def talk(page: Page) -> None:
    """Two turns in Try."""
    await page.get_by_role("link", name="Try", exact=True).click()
    await page.get_by_label("compare with reuse off").check()
    await page.get_by_label("at most").fill("24")
    for turn, question in enumerate(TALK):
        await page.get_by_label("Prompt").fill(question)
        await page.keyboard.press("Enter")
        await page.get_by_role("link", name="Why?").nth(2 * turn + 1).wait_for()


async def pictures(browser: Browser, kvpin: Kvpin, folder: Path) -> None:
    """Opens the page in every size and colour scheme, then takes the pictures."""
    pages: dict[str, Page] = {}
    for size, viewport in (("", DESKTOP), ("-phone", PHONE)):
        for scheme in ("light", "dark"):
            page = pages[f"{size}-{scheme}"] = await browser.new_page(viewport=viewport, color_scheme=scheme)
            await page.goto(kvpin.url)
            await page.locator("article.engine").first.wait_for()
    await load(kvpin)
    for name, page in pages.items():
        await save(page, folder / f"now{name}.png")
        await page.get_by_role("link", name="Map", exact=True).click()
        await page.locator(".box").nth(1).click()
        if name == "-light":
            await page.get_by_role("button", name="Pin for an hour").click()
            await page.get_by_text("pin: done").wait_for()
        await save(page, folder / f"map{name}.png")
        await talk(page)
        await save(page, folder / f"try{name}.png")
        turns = page.get_by_role("group", name="Reuse on")
        await turns.get_by_role("link", name="Why?").last.click()
        await page.locator(".costs").wait_for()
        await save(page, folder / f"why{name}.png")
        await replay(page)
        await save(page, folder / f"replay{name}.png")


async def replay(page: Page) -> None:
    """A recording on engines of four sizes."""
    await page.get_by_role("link", name="Replay", exact=True).click()
    await page.get_by_label("recording", exact=True).set_input_files(TRACE)
    await page.get_by_label("engines", exact=True).fill("4")
    await page.get_by_label("GPU tokens of each").fill("100k,200k,400k,800k")
    await page.get_by_label("load").fill("0.9")
    await page.get_by_role("button", name="Replay").click()
    await page.locator(".u-legend").last.wait_for()


async def report(browser: Browser, folder: Path) -> None:
    """The page of `benchmarks/replay_report.py`."""
    page = await browser.new_page(viewport=DESKTOP, color_scheme="light")
    with tempfile.TemporaryDirectory() as home:
        path, runs = Path(home) / "report.html", str(Path(home) / "runs.json")
        replay = (sys.executable, "-m", "proxy.cli", "replay", str(TRACE), *REPLAY, "--json", runs)
        draw = (sys.executable, str(ROOT / "benchmarks" / "replay_report.py"), runs, str(path))
        for command in (replay, draw):
            await asyncio.to_thread(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)
        await page.goto(path.as_uri())
        await page.locator(".u-legend").last.wait_for()
        await save(page, folder / "report-light.png")


async def save(page: Page, path: Path) -> None:
    """A picture of what is seen first, with few colours: it stays small in the repository."""
    await page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    await page.wait_for_timeout(500)
    await page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(COLORS).save(path, optimize=True)


async def main() -> None:
    """Starts kvpin and Chromium."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "ui"
    folder.mkdir(exist_ok=True)
    libraries = os.environ["CHROMIUM_LIBRARIES"]
    env = {**os.environ, "LD_LIBRARY_PATH": libraries} if libraries else dict(os.environ)
    with tempfile.TemporaryDirectory() as log:
        starting = running_kvpin(Path(log) / "log", "--managed", ENGINE, "--managed", ENGINE)
        kvpin = await asyncio.to_thread(starting.__enter__)
        try:
            async with async_playwright() as playwright:
                browser = await playwright.chromium.launch(
                    executable_path=os.environ["CHROMIUM"], env=env, args=["--no-sandbox"]
                )
                await report(browser, folder)
                await pictures(browser, kvpin, folder)
                await browser.close()
        finally:
            await asyncio.to_thread(starting.__exit__, None, None, None)


if __name__ == "__main__":
    asyncio.run(main())
