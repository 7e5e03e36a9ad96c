"""The pictures of the documentation are what the script draws now, from figures as the tables have them."""

import re
from xml.etree import ElementTree as ET

import pytest

from scripts.make_pictures import DOCS, DRAWINGS, PICTURES, ROOT, svg

PAGES = [ROOT / "README.md", *DOCS.rglob("*.md")]


@pytest.fixture(scope="module", params=DRAWINGS)
def picture(request):
    return request.param, svg(DRAWINGS[request.param])


def test_it_is_what_the_script_draws(picture):
    name, text = picture
    assert (PICTURES / name).read_text("utf-8") == text, "scripts/make_pictures.py draws it anew"


def test_it_is_small_and_whole(picture):
    _, text = picture
    assert len(text) < 60_000
    assert ET.fromstring(text).get("width") == "760"  # noqa: S314 - it was made here


def test_it_has_no_colour_that_stays_in_the_dark(picture):
    _, text = picture
    drawing, dark = re.sub(r"@media.*</style>", "", text), re.search(r"@media.*</style>", text)[0]
    used = set(re.findall(r"(?:fill|stroke): #\w{6}", drawing))
    assert used
    assert [colour for colour in used if f'"{colour}"' not in dark] == []


def test_each_is_shown_with_words_for_those_who_do_not_see_it():
    pages = "".join(page.read_text("utf-8") for page in PAGES)
    shown = dict(re.findall(r"!\[([^\]]*)\]\((?:docs/)?pictures/([\w.-]+)\)", pages)).items()
    assert {name for _, name in shown} == set(DRAWINGS) == {path.name for path in PICTURES.iterdir()}
    assert all(len(words) > 40 for words, _ in shown)
