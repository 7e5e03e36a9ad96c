"""The page about clients shows the declared matrix."""

from tests.clients.conftest import PAGE
from tests.clients.matrix import CLIENTS, FEATURES, table


def test_the_page_shows_the_matrix():
    assert table() in PAGE.read_text(encoding="utf-8")


def test_every_feature_is_run_by_a_client():
    assert {feature for client in CLIENTS.values() for feature in client.features} == set(FEATURES)
