import pytest

from engine_adapter.llama_server.rates import MIN_PREFILL_TOKENS, WINDOW, RateBook


@pytest.fixture
def book():
    return RateBook()


def teach(learn, *samples):
    for sample in samples:
        learn(*sample)


def test_before_anything_is_seen_every_rate_is_above_none(book):
    rates = book.view
    assert min(rates.prefill_tok_s, rates.save_bytes_s, rates.restore_bytes_s, rates.disk_bytes_s) > 0
    assert min(rates.bytes_per_token, rates.hold_s, rates.reuse_probability) > 0


def test_prefills_teach_tokens_per_second(book):
    teach(book.prefilled, *[(1000, 0.5)] * 3)
    assert book.view.prefill_tok_s == pytest.approx(2000)


def test_saves_teach_bytes_per_second_beyond_the_overhead(book):
    teach(book.saved, *[(100, 1_000_000, 0.502)] * 3)
    assert book.view.save_bytes_s == pytest.approx(2_000_000)
    assert book.view.save_s(100) == pytest.approx(0.502)


def test_a_save_tells_the_size_of_a_token_at_once_however_quick_it_was(book):
    book.saved(100, 1_000_000, 0.0)
    assert book.view.bytes_per_token == 10_000
    book.saved(10, 0, 0.1)
    assert book.view.bytes_per_token == 0


def test_an_empty_slot_teaches_nothing(book):
    before = book.view
    book.saved(0, 60, 0.001)
    assert book.view == before


def test_restores_teach_bytes_per_second_beyond_the_overhead(book):
    teach(book.restored, *[(1_000_000, 0.102)] * 3)
    assert book.view.restore_bytes_s == pytest.approx(10_000_000)


def test_requests_teach_how_long_a_slot_is_held(book):
    teach(book.held, (5.0,), (7.0,), (6.0,))
    assert book.view.hold_s == 5.0


@pytest.mark.parametrize(
    "sample",
    [(MIN_PREFILL_TOKENS - 1, 0.5), (1000, 0.0), (1000, -1.0), (0, 1.0)],
    ids=["a round trip", "no time", "less than none", "no tokens"],
)
def test_what_measures_nothing_teaches_nothing(book, sample):
    before = book.view
    teach(book.prefilled, *[sample] * 5)
    assert book.view == before


def test_one_odd_sample_changes_no_mind(book):
    before = book.view
    book.prefilled(1000, 1e-9)
    assert book.view == before
    teach(book.prefilled, *[(1000, 0.5)] * 4, (1000, 60.0))
    assert book.view.prefill_tok_s == pytest.approx(2000)


def test_what_is_long_past_does_not_count(book):
    teach(book.prefilled, *[(1000, 1.0)] * WINDOW, *[(1000, 0.1)] * (WINDOW // 2 + 1))
    assert book.view.prefill_tok_s == pytest.approx(10_000)
