"""The documentation builds as a site without a warning, and its reference is what the code says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.make_reference import PAGES, REFERENCE

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_is_what_the_code_says(name):
    assert (REFERENCE / name).read_text(encoding="utf-8") == PAGES[name](), "scripts/docs writes it anew"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    words = ("-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", str(DOCS), str(folder))
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def test_every_page_is_in_the_sidebar(site):
    home = (site / "README.html").read_text(encoding="utf-8")
    pages = {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md")}
    listed = set(re.findall(r'class="reference internal" href="([\w/-]+\.html)"', home))
    assert pages - {"README.html"} == listed - {"README.html"}


def test_the_site_needs_no_other_host(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?))"', page.read_text("utf-8"))
        assert loaded == []
