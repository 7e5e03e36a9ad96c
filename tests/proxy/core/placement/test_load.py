import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.placement.load import IDLE, MANY, REPORT_S, EngineLedger, LoadSample, LoadView, Spent, Work

THOUSAND = Work(1000)


@pytest.fixture
def ledger():
    return EngineLedger()


def begin(ledger, now=0.0, expected_s=1.0, work=THOUSAND, **more):
    return ledger.begin(now, expected_s, work, **more)


class TestLife:
    def test_a_request_is_a_prefill_then_a_stream_then_nothing(self, ledger):
        assert ledger.view(0.0) is IDLE
        ticket = begin(ledger)
        assert ledger.view(0.25) == LoadView(in_flight=1, queue_s=0.75, decoding=0)
        ledger.first_token(1.0, ticket)
        assert ledger.view(1.0) == LoadView(in_flight=1, queue_s=0.0, decoding=1)
        ledger.end(2.0, ticket)
        assert ledger.view(2.0) is IDLE
        assert (ledger.placed, ledger.in_flight) == (1, 0)


class TestQueue:
    def test_the_engine_turns_from_one_to_the_next(self, ledger):
        first, second = begin(ledger, 0.0, 1.0), begin(ledger, 0.5, 2.0)
        assert ledger.view(0.5).queue_s == pytest.approx(0.5 + 2.0)
        ledger.first_token(0.8, first)
        assert ledger.view(1.8).queue_s == pytest.approx(1.0)
        ledger.first_token(2.8, second)
        assert ledger.view(2.8).queue_s == 0.0

    def test_what_is_late_is_taken_to_be_as_late_again(self, ledger):
        begin(ledger)
        assert [ledger.view(now).queue_s for now in (0.5, 1.0, 1.5, 3.0)] == [0.5, 0.0, 0.5, 2.0]

    def test_what_is_known_later_counts(self, ledger):
        first, ticket = begin(ledger, 0.0, 1.0), begin(ledger, 0.0, 5.0)
        ledger.refine(ticket, 0.5, Work(500))
        assert ledger.view(0.0).queue_s == pytest.approx(1.5)
        ledger.first_token(1.0, first)
        ledger.first_token(1.5, ticket)
        ledger.refine(ticket, 9.0, Work(9000))  # too late to matter
        assert ledger.view(1.5) == LoadView(2, 0.0, 2)

    def test_other_rates_reprice_what_is_in_flight(self, ledger):
        begin(ledger, 0.0, 1.0, Work(1000)), begin(ledger, 0.0, 2.0, Work(2000, host=100))
        ledger.reprice(lambda work: work.computed / 500 + work.host / 100)
        assert ledger.view(1.0).queue_s == pytest.approx(2 + 4 + 1 - 1)

    def test_what_remains_of_one_is_told_apart_from_what_is_before_it(self, ledger):
        first, second = begin(ledger, 0.0, 1.0), begin(ledger, 0.1, 2.0)
        third = begin(ledger, 0.2, 4.0, seen=False)
        assert ledger.remaining(0.25, first) == (0.0, 0.75, True)
        assert ledger.remaining(0.25, third) == (2.75, 4.0, False)
        ledger.first_token(1.0, first)
        assert ledger.remaining(1.5, first) is None
        assert ledger.remaining(1.5, second) == (0.0, 1.5, True)
        for ticket in (second, third):
            ledger.end(2.0, ticket)
        assert ledger.remaining(2.0, third) is None


class TestPulls:
    """Requests whose prompts another engine computes."""

    def test_it_waits_until_its_first_token(self, ledger):
        begin(ledger)
        ticket = ledger.begin_pull()
        assert ledger.view(0.25) == LoadView(in_flight=2, queue_s=0.75, decoding=0)
        assert ledger.first_token(0.5, ticket) is None
        assert ledger.view(0.5) == LoadView(in_flight=2, queue_s=0.5, decoding=1)
        ledger.end(2.0, ticket)
        assert (ledger.placed, ledger.in_flight) == (2, 1)

    def test_it_is_not_lost_while_its_engine_has_yet_to_get_it(self, ledger):
        ledger.begin_pull()
        ledger.reported(1.0, 0)
        ledger.reported(2.0, 0)
        assert ledger.in_flight == 1

    def test_it_teaches_nothing_and_spoils_nothing(self, ledger):
        ticket = begin(ledger)
        ledger.first_token(0.5, ledger.begin_pull())
        sample = ledger.first_token(1.0, ticket)
        assert (sample.work, sample.seconds) == (THOUSAND, 1.0)

    def test_its_prompt_may_have_to_be_computed_after_all(self, ledger):
        ticket = ledger.begin_pull()
        ledger.computes(1.0, ticket, 2.0, THOUSAND)
        assert ledger.view(1.5) == LoadView(in_flight=1, queue_s=1.5, decoding=0)
        sample = ledger.first_token(3.5, ticket)
        assert (sample.work, sample.seconds) == (THOUSAND, 2.5)
        assert ledger.placed == 1


class TestUnseen:
    """Answers that are no streams never tell their first token."""

    def test_it_is_taken_to_come_as_expected(self, ledger):
        ticket = begin(ledger, seen=False)
        assert ledger.view(0.75) == LoadView(1, 0.25, 0)
        assert ledger.view(1.0) == LoadView(1, 0.0, 1)
        ledger.end(5.0, ticket)
        assert ledger.view(5.0) is IDLE

    def test_nothing_is_learned_beside_one(self, ledger):
        first = begin(ledger)
        begin(ledger, 0.0, 9.0, seen=False)
        third = begin(ledger)
        assert ledger.first_token(1.0, first) is None
        assert ledger.first_token(2.0, third) is None
        # The engine turned to the unseen one at 2.0 at the latest, and is done with it by now.
        fourth, fifth = begin(ledger, 11.0), begin(ledger, 11.0)
        assert ledger.first_token(12.0, fourth) is None
        assert ledger.first_token(13.0, fifth) == LoadSample(THOUSAND, 1.0, 3.5)


class TestWholeAnswers:
    """What an engine did from a request to its whole answer."""

    def test_its_own_prompt_and_those_beside_it(self, ledger):
        first = begin(ledger, 0.0, 1.0, Work(1000), seen=False)
        second = begin(ledger, 0.5, 2.0, Work(2000), seen=False)
        third = begin(ledger, 0.5, 4.0, Work(4000), seen=False)
        assert ledger.answered(3.0, first) == Spent(3.0, 3000, 1)
        assert ledger.answered(3.5, second) == Spent(3.0, 3000, 0)
        assert ledger.answered(9.5, third) == Spent(9.0, 7000, 0)
        assert ledger.answered(9.5, third) is None

    def test_when_it_comes_it_and_those_before_it_are_computed_whatever_was_expected(self, ledger):
        tickets = [begin(ledger, 0.0, 100.0, seen=False) for _ in range(3)]
        assert ledger.answered(2.0, tickets[1]) == Spent(2.0, 2000, 1)
        assert ledger.view(2.0) == LoadView(2, 100.0, 1)

    def test_a_stream_before_it_shows_its_first_token_itself(self, ledger):
        stream, whole = begin(ledger), begin(ledger, seen=False)
        assert ledger.answered(2.0, whole) == Spent(2.0, 1000, 0)
        assert ledger.remaining(2.0, stream) is not None
        assert ledger.first_token(2.5, stream) is None

    def test_what_became_of_a_prompt_that_was_given_up_is_not_known(self, ledger):
        whole, given_up = begin(ledger, seen=False), begin(ledger)
        ledger.end(1.0, given_up)
        assert ledger.answered(3.0, whole) is None


class TestLearning:
    """What a prompt took of the engine's time."""

    def test_alone_it_is_from_placement_to_first_token(self, ledger):
        work = Work(1000, host=200, disk=30)
        assert ledger.first_token(0.4, begin(ledger, 0.0, 1.0, work)) == LoadSample(work, 0.4, 0)
        assert ledger.first_token(9.5, begin(ledger, 9.0, 1.0, work)) == LoadSample(work, 0.5, 1)

    def test_those_that_keep_it_busy_are_measured_together(self, ledger):
        prompts = ((0.0, 100), (0.1, 600), (0.3, 800))
        first, second, third = (begin(ledger, at, 1.0, Work(tokens)) for at, tokens in prompts)
        # Two came of one step, and one overtook another: of each alone that tells nothing.
        assert ledger.first_token(1.0, third) is None
        assert ledger.first_token(1.0, first) is None
        assert ledger.first_token(1.5, second) == LoadSample(Work(500), 0.5, 1)

    def test_a_queue_that_never_ends_is_measured_by_the_many(self, ledger):
        tickets, samples = [begin(ledger)], []
        for step in range(1, 2 * MANY + 1):
            tickets.append(begin(ledger, step - 0.5))
            samples.append(ledger.first_token(float(step), tickets.pop(0)))
        assert [at for at, sample in enumerate(samples, 1) if sample] == [MANY, 2 * MANY]
        assert samples[MANY - 1] == LoadSample(THOUSAND, 1.0, (MANY - 1) / 2)

    def test_what_failed_spoils_the_measure_up_to_the_next_first_token(self, ledger):
        first, failed, third, last = (begin(ledger) for _ in range(4))
        assert ledger.first_token(1.0, first) is None
        ledger.end(1.2, failed)
        assert ledger.first_token(2.0, third) is None
        assert ledger.first_token(2.5, last) == LoadSample(THOUSAND, 0.5, 2)

    def test_the_requests_of_others_blur_it(self, ledger):
        ledger.reported(0.0, 3)
        first, second = begin(ledger), begin(ledger)
        assert ledger.first_token(1.0, first) is None
        assert ledger.first_token(2.0, second) == LoadSample(THOUSAND, 1.0, 3.5, blurred=True)
        ledger.reported(3.0, 2)
        assert ledger.first_token(4.0, begin(ledger, 3.0)) == LoadSample(THOUSAND, 1.0, 2)

    def test_a_prompt_that_is_not_known_teaches_nothing_nor_do_those_it_kept_waiting(self, ledger):
        first, unknown, last = begin(ledger), ledger.begin(0.0, 0.0, None), begin(ledger)
        ledger.refine(unknown, 9.0, THOUSAND)
        assert ledger.first_token(1.0, first) is None
        assert ledger.first_token(5.0, unknown) is None
        assert ledger.first_token(6.0, last) == LoadSample(THOUSAND, 1.0, 2)


class TestForgetting:
    def test_the_engine_knows_of_none_twice_in_a_row(self, ledger):
        stream, lost = begin(ledger), begin(ledger, 0.0, 5.0)
        ledger.first_token(1.0, stream)
        ledger.reported(2.0, 0)
        assert ledger.in_flight == 2
        fresh = begin(ledger, 2.5)
        ledger.reported(3.0, 0)
        assert ledger.view(3.0) == LoadView(1, 1.0, 0)
        assert ledger.first_token(3.5, lost) is None
        ledger.reported(4.0, 1)
        ledger.reported(5.0, 0)
        assert ledger.in_flight == 1
        ledger.end(6.0, fresh)
        assert ledger.in_flight == 0

    def test_requests_of_others_count_while_the_report_is_fresh(self, ledger):
        begin(ledger)
        ledger.reported(0.0, 4)
        assert ledger.view(0.5) == LoadView(4, 0.5, 3)
        assert ledger.view(REPORT_S) == LoadView(1, REPORT_S - 1.0, 0)
        ledger.reported(1.0, 0)
        ledger.reported(2.0, 0)
        ledger.reported(3.0, 2)
        assert ledger.view(3.0) == LoadView(2, 0.0, 2)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "unseen", "first", "end", "report"]), st.integers(0, 20), st.floats(0, 30)
    ),
    max_size=60,
)


@given(EVENTS)
def test_whatever_happens_the_books_balance(events):
    ledger, now, tickets = EngineLedger(), 0.0, []
    for kind, which, passed in events:
        now += passed
        if kind in ("begin", "unseen"):
            tickets.append(begin(ledger, now, which / 4, seen=kind == "begin"))
        elif kind == "report":
            ledger.reported(now, which // 4)
        elif tickets:
            ticket = tickets[which % len(tickets)]
            sample = ledger.first_token(now, ticket) if kind == "first" else ledger.end(now, ticket)
            assert sample is None or (sample.seconds >= 0 and sample.work == THOUSAND)
        view = ledger.view(now)
        assert view.queue_s >= -1e-9
        assert view.in_flight >= view.decoding >= 0
        assert len(tickets) >= ledger.in_flight
    for ticket in tickets:
        ledger.end(now, ticket)
    assert ledger.in_flight == 0
    assert ledger.view(now + REPORT_S) is IDLE
