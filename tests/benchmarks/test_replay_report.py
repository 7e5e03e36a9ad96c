import json
import re
from base64 import b64encode
from hashlib import sha256
from html import unescape

import pytest

from proxy.replay.report import as_json, rows
from proxy.replay.simulator import ReplayRun, run_all
from tests.proxy.replay.making import ask, model_of, trace_of

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


@pytest.fixture
def as_html():
    from replay_report import as_html

    return as_html


@pytest.fixture(scope="module")
def each():
    trace = trace_of(*(ask((n % 3, 10 + n), at=n / 10) for n in range(20)))
    return rows(
        run_all(trace, [ReplayRun(name, n, model_of(5)) for n in (1, 2) for name in ("kvpin", "oracle")])
    )


def scripts(page):
    return re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)


def test_it_holds_the_curves_and_a_line_for_each_run(as_html, each):
    page = as_html("a title", each, ["a note"])
    data = next(text for kind, text in scripts(page) if "json" in kind)
    assert [plot["title"][:4] for plot in json.loads(data)] == ["toke", "mean", "p99 "]
    table = page.partition("<tbody>")[2].partition("</tbody>")[0]
    assert [re.findall(r"<td>(\S+)</td>", row) for row in table.split("<tr>")[1:]] == [
        ["kvpin"],
        ["oracle"],
    ] * 2
    assert '<p class="note">a note</p>' in page


def test_it_runs_its_own_scripts_and_loads_nothing(as_html, each):
    page = as_html("a title", each, [])
    policy = unescape(re.search(r'content-security-policy" content="([^"]*)"', page)[1])
    assert policy.startswith("default-src 'none'; ")
    texts = [text for kind, text in scripts(page) if "json" not in kind]
    texts += re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert len(texts) == 3
    for text in texts:
        assert f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" in policy
    assert policy.count("sha256-") == 3
    markup = re.sub(r"<script.*?</script>", "", page)
    assert not re.search(r"<(?:link|img|iframe)|\s(?:src|href|style|on\w+)=", markup)


def test_all_text_is_escaped(as_html, each):
    hostile = [{**row, "policy": HOSTILE} for row in each]
    page, usual = as_html(HOSTILE, hostile, [HOSTILE]), as_html("t", each, [])
    assert "<img" not in page
    assert len(scripts(page)) == len(scripts(usual))
    data = next(text for kind, text in scripts(page) if "json" in kind)
    assert json.loads(data)[0]["lines"][0]["policy"] == HOSTILE
    assert unescape(re.search(r"<title>(.*?)</title>", page)[1]) == HOSTILE


def test_what_replay_wrote_becomes_a_page_and_a_picture(each, tmp_path, monkeypatch):
    import replay_report

    need = {"policy": "kvpin", "target_p99_s": 2.0, "max_engines": 4, "margin": 0.2, "engines": 1}
    p99s = {"p99_ttft_s": 1.0, "p99_ttft_s_with_one_less": None, "p99_ttft_s_with_margin": 1.5}
    document = json.loads(as_json({}, each, ["too short"], title="a title", notes=["a note"]))
    document["needs"] = [need | p99s | {"engines_with_margin": 1}]
    runs = tmp_path / "runs.json"
    runs.write_text(json.dumps(document))
    for name in ("report.html", "report.png"):
        monkeypatch.setattr("sys.argv", ["", str(runs), str(tmp_path / name)])
        replay_report.main()
    page = (tmp_path / "report.html").read_text()
    for said in ("a title", "too short", "a note", "kvpin: plan 1 engine for a p99 TTFT of 2 s: it is 1.5 s"):
        assert said in page
    picture = (tmp_path / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    assert int.from_bytes(picture[16:20], "big") > 1000
