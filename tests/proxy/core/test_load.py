import pytest

from proxy.core.load import DEFAULT_PREFILL_TOK_S, DEFAULT_RESTORE_TOK_S, WINDOW, EngineLedger, LoadView


def test_a_request_is_a_prefill_then_a_stream_then_nothing():
    ledger = EngineLedger()
    ticket = ledger.begin(100)
    assert ledger.view() == LoadView(in_flight=1, prefill_tokens=100, decoding=0)
    ledger.first_token(ticket, 0.1, alone=True)
    assert ledger.view() == LoadView(in_flight=1, prefill_tokens=0, decoding=1)
    ledger.end(ticket)
    assert ledger.view() == LoadView(0, 0, 0)
    assert ledger.served == 1


def test_each_request_has_a_ticket_of_its_own():
    ledger = EngineLedger()
    first, second = ledger.begin(1), ledger.begin(2)
    ledger.end(first)
    ledger.end(first)
    assert ledger.view() == LoadView(in_flight=1, prefill_tokens=2, decoding=0)
    ledger.end(second)


def test_a_request_that_ends_before_its_first_token_leaves_nothing():
    ledger = EngineLedger()
    ticket = ledger.begin(100)
    ledger.end(ticket)
    ledger.first_token(ticket, 1.0, alone=True)
    assert ledger.view() == LoadView(0, 0, 0)
    assert ledger.prefill_tok_s == DEFAULT_PREFILL_TOK_S


class TestRate:
    @staticmethod
    def sample(ledger, tokens, seconds, *, alone=True):
        ticket = ledger.begin(tokens)
        ledger.first_token(ticket, seconds, alone=alone)
        ledger.end(ticket)

    def test_is_the_median_of_the_last_samples(self):
        ledger = EngineLedger()
        for seconds in (1.0, 0.5, 100.0):
            self.sample(ledger, 1000, seconds)
        assert ledger.prefill_tok_s == 1000
        for _ in range(WINDOW):
            self.sample(ledger, 1000, 0.1)
        assert ledger.prefill_tok_s == pytest.approx(10_000)

    def test_learns_nothing_from_crowds_short_prompts_or_no_time(self):
        ledger = EngineLedger()
        self.sample(ledger, 1000, 1.0, alone=False)
        self.sample(ledger, 63, 1.0)
        self.sample(ledger, 1000, 0.0)
        assert ledger.prefill_tok_s == DEFAULT_PREFILL_TOK_S
        assert ledger.restore_tok_s == DEFAULT_RESTORE_TOK_S

    def test_of_restores_is_what_the_rest_of_a_first_token_time_leaves(self):
        ledger = EngineLedger()
        self.sample(ledger, 1000, 1.0)
        for seconds in (0.3, 0.2, 9.0):
            ticket = ledger.begin(100, 2000)
            ledger.first_token(ticket, seconds, alone=True)
            ledger.end(ticket)
        # 100 tokens take 0.1 s of each: 2000 were restored in 0.2, 0.1 and 8.9 s.
        assert ledger.restore_tok_s == pytest.approx(10_000)
        assert ledger.prefill_tok_s == 1000

    def test_a_restore_is_not_taken_for_nothing_by_a_prefill_rate_that_is_off(self):
        ledger = EngineLedger()
        self.sample(ledger, 1000, 1.0)
        ledger.first_token(ledger.begin(500, 1000), 0.4, alone=True)
        assert ledger.restore_tok_s == pytest.approx(5000)

    def test_what_is_known_later_counts(self):
        ledger = EngineLedger()
        ticket = ledger.begin(1000)
        ledger.refine(ticket, 10, 990)
        assert ledger.view().prefill_tokens == 10
        ledger.first_token(ticket, 0.1, alone=True)
        assert ledger.prefill_tok_s == DEFAULT_PREFILL_TOK_S
        assert ledger.restore_tok_s == pytest.approx(990 / 0.0975)
        ledger.refine(ticket, 5000, 0)
        ledger.end(ticket)
        assert ledger.view() == LoadView(0, 0, 0)

    def test_restoring_is_at_least_ten_times_as_fast(self):
        ledger = EngineLedger()
        self.sample(ledger, 20_000, 1.0)
        assert ledger.restore_tok_s == 200_000
