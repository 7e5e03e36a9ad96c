"""Which user asks what."""

from types import SimpleNamespace

import pytest


@pytest.fixture
def live():
    import live_routers

    return live_routers


def test_a_chat_is_one_users_and_keeps_its_order(live):
    sessions = ["chat-1", "document-7", "chat-2", "chat-1", "document-7", "chat-2", "chat-1"]
    work = [SimpleNamespace(session=session, at=at) for at, session in enumerate(sessions)]
    of_users = [[question.at for question in mine] for mine in live.shares(work, 3)]
    assert of_users == [[0, 3, 6, 4], [1], [2, 5]]


def test_the_table_says_what_was_not_measured(live):
    def result(router, workload, **figures):
        return SimpleNamespace(router=router, workload=workload, **figures)

    base = {"mean_ms": 30.04, "engine_ms": 20.0, "p99_ms": 99.6}
    found = [
        result("direct", "small", median_ms=0.5),
        result("kvpin", "base", **base),
        result("kvpin", "small", median_ms=1.25),
        result("sglang-tuned", "base", **base),
    ]
    *_, kvpin, other = live.report(found).splitlines()
    assert kvpin == "| kvpin | 30.0 [20.0], 100 | 0.75 |"
    assert other.endswith("| 30.0 [20.0], 100 | – |")
