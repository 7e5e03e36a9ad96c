"""Measures how long the page keeps a browser busy while 256 engines serve 10,000 requests a minute.

    scripts/with-chromium .venv/bin/python scripts/measure_page.py [SECONDS]

The engines and requests are made up. The page, the browser and the rate of events are real: kvpin shows
20 requests a second at most, however many there are. Times are CPU time of the page's main thread, as the
browser traces it: other programs of a busy machine do not count.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, async_playwright
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from proxy.api.page import WebPage  # noqa: E402 - found by the line before
from proxy.control.live import SHOWN_PER_S  # noqa: E402
from tests.fakes import serving  # noqa: E402

ENGINES, REQUESTS_PER_S, PREFIXES = 256, 10_000 / 60, 300
LONG_MS = 50  # as browsers define a long task


def _event(name: str, content: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(content)}\n\n"


def _snapshot(number: int) -> dict[str, Any]:
    reuse = {
        "prompt_tokens": 9000 * number,
        "available_tokens": 8000 * number,
        "selected_tokens": 7000 * number,
        "delivered_tokens": 6000 * number,
        "saved_s": 1.5 * number,
    }
    engine = {
        "model": "m", "state": "ready", "trust": "precise", "why": "", "queue_s": 0.01 * number,
        "in_flight": number, "decoding": number, "held_tokens": {"gpu": 50 * number, "host": 90 * number},
        "capacity_tokens": {"gpu": 90_000}, "reuse": reuse, "last_error": None,
    }  # fmt: skip
    engines = [{**engine, "id": f"engine-{at}"} for at in range(ENGINES)]
    return {
        "at": time.time(), "reuse_on": True, "requests": int(number * REQUESTS_PER_S),
        "unshown": int(REQUESTS_PER_S - SHOWN_PER_S), "waiting": {}, "reuse": reuse, "engines": engines,
    }  # fmt: skip


def _record(number: int) -> dict[str, Any]:
    return {
        "request_id": f"req-{number:032x}", "started": time.time(), "engine": f"engine-{number % ENGINES}",
        "n_tokens": 2000, "available_tokens": 1900, "predicted_tokens": 1800, "reported_tokens": 1800,
        "first_byte_s": 0.1, "status": 200, "why": "engine-7 holds most of it, and its queue is the shortest",
    }  # fmt: skip


async def _events(_request: Request) -> StreamingResponse:
    async def stream() -> AsyncIterator[str]:
        for number in range(10**6):
            if number % SHOWN_PER_S == 0:
                yield _event("snapshot", _snapshot(1 + number // SHOWN_PER_S))
            yield _event("placed", _record(number)) + _event("finished", _record(number))
            await asyncio.sleep(1 / SHOWN_PER_S)

    return StreamingResponse(stream(), media_type="text/event-stream")


async def _prefixes(_request: Request) -> JSONResponse:
    """A system prompt, documents below it, and talks below those."""
    holders = [{"engine": f"engine-{at}", "tokens": {"gpu": 512}} for at in range(8)]
    node = {
        "request_id": "req-1", "model": "m", "lora": None, "tenant": None, "requests": 9, "engines": ENGINES,
        "last_used": time.time(), "holders": holders, "pins": [], "unshown": 0,
    }  # fmt: skip

    def grow(name: str, start: int, below: int, level: int) -> dict[str, Any]:
        children = [grow(f"{name}{n}", start + 512, below // 6, level + 1) for n in range(6)] if level else []
        ends = {"id": name, "start": start, "end": start + 512, "below": below}
        return {**node, **ends, "children": children}

    tops = [grow("a", 0, 2_000_000, 0)]
    tops[0]["children"] = [
        {**grow(f"b{n}", 512, 330_000, 0), "children": [grow(f"c{n}-{m}", 1024, 7000, 0) for m in range(48)]}
        for n in range(PREFIXES // 50)
    ]
    return JSONResponse({"requests": 512, "tokens": 2_000_000, "path": [], "prefixes": tops, "unshown": 0})


async def measure(browser: Browser, url: str, view: str, seconds: float) -> str:
    """Watches one view."""
    page = await browser.new_page(viewport={"width": 1120, "height": 800})
    await page.goto(f"{url}/ui/#{view}")
    await page.locator("article").first.wait_for()
    await asyncio.sleep(2)  # what is made once
    await browser.start_tracing(page=page, categories=["disabled-by-default-devtools.timeline"])
    began = time.monotonic()
    await asyncio.sleep(seconds)
    tasks = _tasks(json.loads(await browser.stop_tracing())["traceEvents"])
    share = sum(tasks) / 1000 / (time.monotonic() - began)
    await page.close()
    long = sum(task >= LONG_MS for task in tasks)
    longest = f"the longest {max(tasks):.0f} ms"
    return f"{view}: main thread busy {share:.1%}; {long} tasks of {LONG_MS} ms or more, {longest}"


def _tasks(events: list[dict[str, Any]]) -> list[float]:
    """CPU time of each task of the page's main thread, in ms."""
    named = [event for event in events if event["name"] == "thread_name"]
    main = {(each["pid"], each["tid"]) for each in named if each["args"]["name"] == "CrRendererMain"}
    tasks = [event for event in events if event["name"] == "RunTask" and (event["pid"], event["tid"]) in main]
    return [task.get("tdur", 0) / 1000 for task in tasks]


async def main() -> None:
    """Measures the views that draw again as events come."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    libraries = os.environ["CHROMIUM_LIBRARIES"]
    env = {**os.environ, "LD_LIBRARY_PATH": libraries} if libraries else dict(os.environ)
    routes = [
        *WebPage().routes(),
        Route("/admin/v1/events", _events),
        Route("/admin/v1/prefixes", _prefixes),
    ]
    async with serving(Starlette(routes=routes)) as url, async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=os.environ["CHROMIUM"], env=env, args=["--no-sandbox"]
        )
        for view in ("now", "map"):
            print(await measure(browser, url, view, seconds))
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main())
