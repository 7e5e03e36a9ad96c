"""The page about clients shows the declared matrix."""

from tests.clients.conftest import PAGE
from tests.clients.matrix import table


def test_the_page_shows_the_matrix():
    assert table() in PAGE.read_text(encoding="utf-8")
