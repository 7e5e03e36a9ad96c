from proxy.core.audit import (
    ENOUGH,
    FAILURES,
    MAX_OPEN_S,
    MIN_MISSES,
    ODD,
    OPEN_S,
    WINDOW,
    Breaker,
    EmptyAnswers,
    EngineAudit,
    Trust,
)


def synced():
    audit = EngineAudit()
    audit.synced()
    return audit


def test_an_engine_is_approximate_until_its_events_are_in():
    audit = EngineAudit()
    assert audit.trust is Trust.APPROXIMATE
    audit.synced()
    assert (audit.trust, audit.why) == (Trust.PRECISE, "events are healthy")
    audit.lost("a gap")
    assert (audit.trust, audit.why) == (Trust.APPROXIMATE, "a gap")


def test_persistent_misses_ask_for_a_resync_once():
    audit = synced()
    answers = [audit.observe(32, 16) for _ in range(MIN_MISSES)]
    assert answers == [False] * (MIN_MISSES - 1) + [True]
    assert audit.trust is Trust.APPROXIMATE
    assert audit.why == "5 of the last 5 predictions missed"
    assert not audit.observe(32, 16)


def test_resyncs_that_do_not_help_become_rare():
    audit, gaps, since = synced(), [], 0
    for _ in range(400):
        since += 1
        if audit.observe(32, 16):
            audit.synced()
            gaps.append(since)
            since = 0
    assert gaps[:5] == [5, 10, 20, 40, 40]
    for _ in range(WINDOW):
        audit.observe(16, 16)
    audit.synced()
    assert [audit.observe(32, 16) for _ in range(5)][-1], "a good window forgives"


def test_a_miss_after_an_eviction_is_counted_and_doubts_nothing():
    audit = synced()
    for _ in range(3 * MIN_MISSES):
        assert not audit.observe(32, 16, evicted_since=True)
    view = audit.view()
    assert (audit.trust, view.checked, view.exact) == (Trust.PRECISE, 3 * MIN_MISSES, 0)
    assert view.recent_miss_share == 0
    assert not audit.observe(32, 32, evicted_since=True)
    assert audit.view().exact == 1
    audit.observe(32, 16)
    assert audit.view().recent_miss_share == 0.5  # what was exact counts


def test_less_than_a_block_more_than_predicted_is_exact_where_pages_are_smaller():
    audit = synced()
    for reported in (16, 17, 31):
        audit.observe(16, reported, within=16)
    assert audit.view().exact == 3
    for reported in (15, 32):
        audit.observe(16, reported, within=16)
    assert (audit.view().exact, audit.view().checked) == (3, 5)


def opened(at=0.0):
    breaker = Breaker()
    assert [breaker.failed(at) for _ in range(FAILURES)] == [False] * (FAILURES - 1) + [True]
    return breaker


def test_some_failures_in_a_row_open_it():
    breaker = Breaker()
    for _ in range(3 * FAILURES):
        for _ in range(FAILURES - 1):
            assert not breaker.failed(0.0)
        breaker.answered(0.0)
    assert breaker.is_closed
    assert breaker.allows(0.0, 1000)
    assert not opened().allows(0.0, 0)


def test_then_it_lets_one_through_and_twice_as_many_after_each_answer():
    breaker, now = opened(), OPEN_S
    most = []
    while not breaker.is_closed:
        most.append(sum(breaker.allows(now, count) for count in range(100)))
        breaker.answered(now)
    assert most == [1, 2, 4, 8, 16]
    assert breaker.allows(now, ENOUGH)


def test_a_failure_then_opens_it_for_twice_as_long():
    breaker, now, spans = opened(), 0.0, []
    for _ in range(7):
        closed = now
        while not breaker.allows(now, 0):
            now += 0.5
        spans.append(now - closed)
        assert breaker.failed(now)
    assert spans == [1, 2, 4, 8, 16, MAX_OPEN_S, MAX_OPEN_S]


def test_what_was_sent_before_it_opened_says_nothing():
    breaker = opened()
    assert not breaker.failed(OPEN_S / 2)
    breaker.answered(OPEN_S / 2)
    assert not breaker.allows(OPEN_S / 2, 0)
    assert [breaker.allows(OPEN_S, count) for count in (0, 1)] == [True, False]


def test_empty_answers_fail_only_beside_others_with_text():
    empty = EmptyAnswers()
    assert [empty.fails(1) for _ in range(20)] == [False] * 20  # the others have given none since
    assert not empty.is_odd
    empty.in_a_row = 0  # it gave a text
    for texts in range(ODD, 50, ODD):
        assert not empty.fails(texts)  # one alone is no finding
        assert empty.fails(texts + 1)
        assert empty.is_odd
        empty.in_a_row = 0
        assert not empty.is_odd
