"""What `benchmarks/replay_report.py` writes, opened from disk as a reader does."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.replay.report import rows
from proxy.replay.simulator import ReplayRun, run_all
from tests.proxy.replay.making import ask, model_of, trace_of

TITLE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def report(tmp_path, monkeypatch) -> Path:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from replay_report import as_html

    trace = trace_of(*(ask((n % 3, 10 + n), at=n / 10) for n in range(20)))
    runs = [ReplayRun(name, n, model_of(5)) for n in (1, 2, 4) for name in ("kvpin", "sticky", "oracle")]
    path = tmp_path / "report.html"
    path.write_text(as_html(TITLE, rows(run_all(trace, runs)), []), encoding="utf-8")
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_shows_its_curves_and_asks_for_no_other_file(browser, report, scheme):
    page = await browser.new_page(color_scheme=scheme, viewport={"width": 390, "height": 844})
    told: list[str] = []
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("request", lambda request: told.append(request.url))
    await page.goto(report.as_uri())
    await page.locator("canvas").nth(2).wait_for()
    assert await page.get_by_text(TITLE).count() == 1
    first = page.locator("figure").first
    assert await first.locator(".u-legend .u-series").count() == 4
    await first.locator(".u-over").hover(position={"x": 1, "y": 20})
    await first.locator(".u-series").first.get_by_text("1", exact=True).wait_for()
    assert await page.locator(".scroll tbody tr").count() == 9
    width = await page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390
    assert told == [report.as_uri()]
