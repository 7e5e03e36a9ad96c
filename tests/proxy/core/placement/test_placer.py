"""The whole of placement, as the proxy and `kvpin replay` run it: scripts of events on a clock."""

from collections import Counter
from heapq import heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter import Tier
from engine_adapter.types import Attention, KvGroup, Role, Usage
from proxy.core.index.blocks import Chain
from proxy.core.placement import placer as module
from proxy.core.placement.load import IDLE, EngineLedger, Work
from proxy.core.placement.pairs import STALL
from proxy.core.placement.placer import Placer
from proxy.core.placement.whole_answers import MIN_ANSWERS


def prompt(name, blocks=10, size=16):
    """Blocks of its own: of two prompts of one name, the longer goes on from the shorter."""
    return Chain(tuple(1000 * name + at for at in range(1, blocks + 1)), size * blocks + 1, size)


@pytest.fixture
def placer():
    placer = Placer(16)
    for name in ("a", "b"):
        placer.add(name, gpu_blocks=100)
    return placer


def place(placer, now, chain, *names):
    """Where it goes, of all engines or those named."""
    matches = placer.match(chain)
    candidates = [placer.candidate(now, name, matches.get(name)) for name in names or placer.books]
    return placer.place(now, candidates, chain)


def begin_at(placer, now, placement, chain, **more):
    """The request goes where it was placed."""
    return placer.begin(now, placement.engine, placement.work, chain, **more)


def begin(placer, now, chain, *names, **more):
    return begin_at(placer, now, place(placer, now, chain, *names), chain, **more)


def serve(placer, now, chain, *, took_s=0.1, session=None, on=()):
    """A streamed request from beginning to end, alone; returns its engine and the cached tokens predicted."""
    placement = place(placer, now, chain, *on)
    placed = begin_at(placer, now, placement, chain, session=session)
    placer.first_token(now + took_s, placed)
    placer.index.store(placement.engine, Tier.GPU, chain.hashes)
    placer.end(now + took_s + 1.0, placed, placement.uncached_tokens)
    placer.settled(placed)
    return placement.engine, placement.predicted_tokens


class TestEngines:
    def test_one_that_comes_back_starts_anew_but_for_requests_that_still_run(self, placer):
        serve(placer, 0.0, prompt(1))
        running = EngineLedger()
        running.begin(0.0, 1.0, Work(4000))
        old = placer.books["a"]
        placer.add("a", running, gpu_blocks=7)
        book = placer.books["a"]
        assert book is not old
        assert (book.ledger, book.gpu_blocks, book.turn, len(book.residents._prompts)) == (running, 7, 0, 0)
        assert placer.index.counts("a") == (0, 0, 0, 0)

    @pytest.mark.parametrize(("own", "told"), [(64, (64, 200, 40)), (8, (16, 25, 5))])
    def test_another_block_size_changes_what_it_may_hold_and_not_what_it_holds(self, placer, own, told):
        placer.add("a", tokens_per_block=32, gpu_blocks=50, host_blocks=10)
        placer.add("b", tokens_per_block=32)
        serve(placer, 0.0, prompt(1), on="a")
        for name in "ab":
            placer.resize(name, 32, own)
            assert placer.candidate(0.0, name).tokens_per_block == told[0]
        book = placer.books["a"]
        assert (book.tokens_per_block, book.gpu_blocks, book.host_blocks) == told
        assert (book.in_use.capacity, placer.index.held("a", Tier.GPU)) == (told[1], 10)
        assert placer.books["b"].gpu_blocks is None

    def test_what_was_begun_before_it_was_lost_settles_without_a_trace(self, placer):
        chain = prompt(1)
        placement = place(placer, 0.0, chain)
        tickets = [begin_at(placer, 0.0, placement, chain)]
        placer.remove(placement.engine)
        placer.add(placement.engine)
        tickets.append(begin_at(placer, 1.0, placement, chain))
        placer.settled(tickets[0])
        assert placer.index.counts(placement.engine)[3] == len(chain.hashes)
        placer.remove(placement.engine)
        for placed in tickets:
            placer.first_token(2.0, placed)
            placer.end(2.0, placed, None)
            placer.settled(placed)
        assert list(placer.books) == ["b"]

    def test_a_wipe_takes_what_it_held_and_nothing_else(self, placer):
        engine, _ = serve(placer, 0.0, prompt(1))
        placer.wipe(engine)
        assert placer.match(prompt(1)) == {}
        assert len(placer.books[engine].residents._prompts) == 0
        assert placer.books[engine].turn == 1


class TestCandidates:
    @pytest.mark.parametrize(
        ("gpu", "host", "stored", "free", "room"),
        [
            (100, None, {"gpu": 30}, 70, 70),
            (100, 400, {"gpu": 30, "host": 50}, 70, 70 + 350),
            (10, 20, {"gpu": 30, "host": 30}, 0, 0),  # never below none
            (None, 400, {"gpu": 30}, None, None),
        ],
    )
    def test_there_is_room_on_both_tiers(self, gpu, host, stored, free, room):
        placer = Placer(16)
        placer.add("a", gpu_blocks=gpu, host_blocks=host)
        for tier, blocks in stored.items():
            placer.index.store("a", Tier(tier), range(1, blocks + 1))
        told = placer.candidate(0.0, "a")
        assert (told.free_blocks, told.room) == (free, room)

    @pytest.mark.parametrize(
        ("stored", "size", "room"),
        [
            (0, 16, 100),  # of 300 blocks, a prompt's block takes one in each group
            (30, 16, 70),  # 90 are taken, and a third of the rest is for full attention
            (10, 16, 150),  # most window blocks were evicted: a prompt keeps less in the groups
            (10, 32, 98),  # their blocks are twice as large
        ],
    )
    def test_groups_share_the_room(self, stored, size, room):
        placer = Placer(16)
        placer.add("a", gpu_blocks=300)
        groups = [KvGroup(number, Attention.WINDOW, 64) for number in (1, 2)]
        for group in groups:
            placer.index.add_group("a", group, size, 16)
            placer.index.store_group("a", group, tuple(range(1, stored + 1)))
            placer.index.store_group("a", group, (1, 2)[:stored])  # nothing new
        placer.index.store("a", Tier.GPU, range(1, 31 if stored else 1))
        told = placer.candidate(0.0, "a")
        assert (told.free_blocks, told.room) == (room, room)
        placer.begin(0.0, "a", Work(160), prompt(9))
        assert placer.candidate(0.0, "a").room == room - 10
        for group in groups:
            placer.index.remove_group("a", group, (*range(1, 31), 99))
        assert placer.index.groups_of("a").held == 0


class TestPlacement:
    def test_a_cost_asked_for_later_is_the_one_that_was_decided_with(self, placer):
        """Loads, rates, caches and memory in use have all changed by then."""
        serve(placer, 0.0, prompt(1))
        serve(placer, 5.0, prompt(2, blocks=80))
        chain = prompt(1, blocks=95)
        early, late = place(placer, 10.0, chain), place(placer, 10.0, chain)
        at_once = early.costs
        for name in "abab":
            begin_at(placer, 10.0, place(placer, 10.0, prompt(7, blocks=90), name), prompt(7, blocks=90))
        placer.rates.computed(1000, 9.0, 3)
        placer.wipe("a")
        assert late.costs == at_once
        assert late.chosen in late.costs
        assert place(placer, 11.0, chain).costs != at_once

    def test_what_is_about_to_be_computed_draws_what_shares_it(self, placer):
        chain = prompt(1, blocks=90)
        placements = []
        for _ in range(4):
            placements.append(place(placer, 0.0, chain))
            begin_at(placer, 0.0, placements[-1], chain)
        assert {placement.engine for placement in placements} == {"a"}
        assert [placement.predicted_tokens for placement in placements] == [0, 1440, 1440, 1440]
        assert [placement.chosen.pending_tokens for placement in placements] == [0, 1440, 1440, 1440]

    def test_an_unknown_prompt_goes_where_the_fewest_requests_are(self, placer):
        first = place(placer, 0.0, None)
        placed = begin_at(placer, 0.0, first, None, streams=False)
        second = place(placer, 0.0, None)
        assert (first.rule, {first.engine, second.engine}) == ("least loaded", {"a", "b"})
        placer.end(1.0, placed, 0)
        placer.settled(placed)
        assert len(placer.books[first.engine].residents._prompts) == 0
        assert placer.index.counts(first.engine) == (0, 0, 0, 0)

    def test_work_weighs_more_where_engines_are_busy(self, placer):
        assert place(placer, 0.0, prompt(1)).strain == pytest.approx(1 / 0.9)
        for second in range(600):
            chain = prompt(second, blocks=200)
            placement = place(placer, float(second), chain)
            placed = begin_at(placer, float(second), placement, chain)
            placer.first_token(second + 0.8, placed)
            placer.end(second + 0.9, placed, None)
            placer.settled(placed)
        # 0.8 s of every second, of two engines.
        assert place(placer, 600.0, prompt(1)).strain == pytest.approx(1 / 0.6, rel=0.05)
        # Those that a request cannot go to are engines nevertheless.
        assert place(placer, 600.0, prompt(1), "b").strain == pytest.approx(1 / 0.6, rel=0.05)

    def test_what_engines_refused_is_no_work(self, placer):
        for second in range(5):
            for _ in range(4):
                placement = place(placer, float(second), prompt(second, blocks=200))
                placed = begin_at(placer, float(second), placement, prompt(second, blocks=200))
                placer.end(second + 0.01, placed, None)
                placer.settled(placed)
        assert place(placer, 5.0, prompt(1)).strain == pytest.approx(1 / 0.9)

    def test_what_is_brought_back_is_work_too(self, placer):
        serve(placer, 0.0, prompt(0, blocks=100))
        for second in range(600):
            placed = begin(placer, float(second), prompt(1), "a")
            placer.refine(placed, Work(1, host=80_000))
            placer.end(second + 0.5, placed, 1)
        assert placer.candidate(600.0, "a").busy == pytest.approx(0.5, rel=0.05)
        work = Work(1, host=80_000)
        placer.refine(begin(placer, 700.0, prompt(1), "a"), work)
        assert placer.candidate(700.0, "a").load.queue_s == pytest.approx(placer.books["a"].rates.price(work))

    def test_where_streams_hold_the_memory_a_prompt_waits_for_one_to_end(self, placer):
        serve(placer, 0.0, prompt(0))
        streams = [begin(placer, 10.0, prompt(name, blocks=90), "a") for name in (1, 2)]
        for stream in streams:
            placer.first_token(10.0, stream)
        # Answers take a second; 170 blocks are to hold in 100, of 180 in use.
        assert place(placer, 10.0, prompt(3, blocks=90), "a").costs[0].room_s == pytest.approx(170 / 180)
        assert place(placer, 10.0, prompt(3, blocks=90), "b").costs[0].room_s == 0.0
        for stream in streams:
            placer.end(11.0, stream, None)
        assert place(placer, 11.0, prompt(3, blocks=90), "a").costs[0].room_s == 0.0

    def test_at_rates_that_nothing_taught_nobody_is_busy_for_long(self, placer):
        for second in range(100):
            chain = prompt(second, blocks=200)
            placement = place(placer, float(second), chain)
            placer.end(second + 0.9, begin_at(placer, float(second), placement, chain, streams=False), 3201)
            if second == 5:
                assert place(placer, 6.0, prompt(200)).strain == pytest.approx(1 / 0.6, rel=0.1)
        assert place(placer, 100.0, prompt(200)).strain == pytest.approx(1 / 0.9)
        assert placer.candidate(100.0, "a").busy == 0.0


class TestBursts:
    """Questions of 8 blocks about a new document of 500, which an engine computes in 2 s."""

    @staticmethod
    def engines(count):
        placer = Placer(16)
        for at in range(count):
            placer.add(f"e{at}", gpu_blocks=100_000)
        placer.rates.computed(8000, 2.0, 0)
        return placer

    @staticmethod
    def question(number):
        own = range(10**6 + 1000 * number, 10**6 + 1000 * number + 8)
        return Chain((*range(10**9, 10**9 + 500), *own), 508 * 16 + 1, 16)

    def ask(self, placer, now, *numbers):
        """Asks these at once; how many of them each engine gets."""
        return Counter(begin(placer, now, self.question(number)).book.engine for number in numbers)

    @given(st.integers(1, 9), st.integers(0, 60), st.integers(0, 60))
    def test_copies_spread_as_a_burst_grows(self, count, small, more):
        few, many = (self.ask(self.engines(count), 0.0, *range(size)) for size in (small, small + more))
        assert len(few) <= len(many)
        assert len(many) == min(count, small + more)
        assert not many or max(many.values()) <= -(-(small + more) // count) + 1

    def test_a_few_wait_for_the_first_copy_if_they_come_while_it_is_computed(self):
        placer = self.engines(5)
        (leader,) = self.ask(placer, 0.0, 0)
        assert self.ask(placer, 1.0, 1, 2, 3) == {leader: 3}


class TestEvictions:
    """Prompts that an engine has yet to read may evict what others of them are to reuse."""

    @pytest.fixture
    def full(self, placer):
        """90 of 100 blocks are taken."""
        for name in range(9):
            serve(placer, float(name), prompt(name), on="a")
        return placer

    def test_those_placed_later_count_too(self, full):
        old = begin(full, 20.0, prompt(0), "a")
        assert not old.may_be_evicted
        begin(full, 20.0, prompt(20, blocks=10), "a")
        assert not old.may_be_evicted  # 10 blocks are free
        begin(full, 20.0, prompt(21, blocks=1), "a")
        assert old.may_be_evicted

    def test_what_was_read_evicts_no_more(self, full):
        full.first_token(20.5, begin(full, 20.0, prompt(20, blocks=50), "a"))
        old = begin(full, 21.0, prompt(0), "a")
        begin(full, 21.0, prompt(21, blocks=10 - module.STREAM_BLOCKS), "a")
        assert not old.may_be_evicted

    def test_streams_need_more_blocks_while_a_prompt_waits(self, full):
        serve(full, 15.0, prompt(9), on="a")
        assert not begin(full, 20.0, prompt(0), "a").may_be_evicted, "alone, it evicts nothing of its own"
        full.first_token(20.5, begin(full, 20.0, prompt(9, blocks=11), "a"))
        old, late = (begin(full, 21.0, prompt(name, blocks=12), "a") for name in (1, 8))
        assert (old.may_be_evicted, late.may_be_evicted) == (True, False)

    def test_the_rest_of_a_prompt_whose_end_was_evicted_leaves_first(self, full):
        full.index.remove("a", Tier.GPU, prompt(4).hashes[-3:])
        full.books["a"].residents.lost(19.0, 100, lambda _: 0.0)
        rest = begin(full, 20.0, prompt(4), "a")
        assert not rest.may_be_evicted
        begin(full, 20.0, prompt(20, blocks=14), "a")  # 13 are free
        assert rest.may_be_evicted

    def test_a_host_tier_keeps_what_they_evict(self):
        placer = Placer(16)
        placer.add("a", gpu_blocks=10, host_blocks=100)
        serve(placer, 0.0, prompt(0))
        begin(placer, 1.0, prompt(1), "a")
        assert not begin(placer, 1.0, prompt(0)).may_be_evicted

    def test_until_a_window_has_left_them_prompts_take_its_blocks_too(self):
        placer = Placer(16)
        placer.add("a", gpu_blocks=60)
        group = KvGroup(1, Attention.WINDOW, 64)
        groups = placer.index.add_group("a", group, 16, 16)
        assert groups.evicted(60, 0, 100) == 0  # nothing is there
        placer.index.store("a", Tier.GPU, prompt(0, blocks=30).hashes)
        placer.index.store_group("a", group, prompt(0, blocks=30).hashes[-10:])
        placer.books["a"].residents.use(0.0, prompt(0, blocks=30).hashes, 30)
        assert [groups.evicted(60, 30, coming) for coming in (10, 14)] == [0, 8 * 30 // 40]  # 20 are free
        old = begin(placer, 0.0, prompt(0, blocks=31), "a")
        begin(placer, 0.0, prompt(1, blocks=10), "a")
        assert not old.may_be_evicted
        begin(placer, 0.0, prompt(2, blocks=4), "a")
        assert old.may_be_evicted

    def test_who_is_over_evicts_nothing(self, placer):
        lives = [begin(placer, 0.0, prompt(name, blocks=60), "a") for name in range(4)]
        assert placer.books["a"].unread_blocks == 240
        placer.first_token(1.0, lives[0])
        placer.end(2.0, lives[0], 10)
        placer.end(2.0, lives[1], None)  # it failed
        placer.end(2.0, lives[2], 961)  # its answer came whole
        placer.first_token(2.0, lives[3])
        placer.end(3.0, lives[3], None)
        assert (placer.books["a"].unread, placer.books["a"].unread_blocks) == ({}, 0)


class TestRequests:
    def test_a_first_token_teaches_the_pool(self, placer):
        serve(placer, 0.0, prompt(1, blocks=50), took_s=1.0)
        assert [book.rates.prefill_s(801) for book in placer.books.values()] == pytest.approx([1.0, 1.0])
        assert placer.candidate(9.0, "a").load is IDLE

    def test_what_is_in_flight_is_repriced_when_rates_turn_out_to_be_others(self, placer):
        begin(placer, 0.0, prompt(1, blocks=50), "a")
        assert placer.candidate(0.0, "a").load.queue_s == pytest.approx(801 / 4000)
        placer.first_token(2.0, begin(placer, 0.0, prompt(2, blocks=50), "b"))
        assert placer.candidate(0.0, "a").load.queue_s == pytest.approx(2.0)

    def test_one_that_was_refused_and_asked_for_elsewhere_was_asked_for_once(self, placer):
        for name in range(200):
            chain = prompt(name)
            refused = begin(placer, float(name), chain, "a")
            placer.end(float(name), refused, None)
            placer.first_token(name + 0.1, begin(placer, float(name), chain, "b"))
        assert placer.demand.returns(0.0) < 0.02
        assert placer.candidate(200.0, "a").busy == 0.0

    @pytest.mark.parametrize(("chain", "known"), [(None, True), (prompt(1, blocks=50), False)])
    def test_one_that_is_not_known_teaches_nothing(self, placer, chain, known):
        placer.first_token(9.0, begin(placer, 0.0, chain, "a", known=known))
        assert not placer.rates.learned

    def test_what_is_brought_back_is_on_the_gpu_again(self):
        placer = Placer(16)
        placer.add("a", gpu_blocks=100, host_blocks=1000)
        chain, longer = prompt(1, blocks=90), prompt(1, blocks=91)
        placer.index.store("a", Tier.HOST, chain.hashes)
        placed = begin(placer, 0.0, longer)
        assert placed.work == Work(17, host=1440)
        placer.index.store("a", Tier.GPU, longer.hashes)
        placer.end(1.0, placed, 17)
        assert placer.books["a"].on_gpu.lost(2.0, 95, lambda _idle_s: 1.0) == 91.0
        placer.wipe("a")
        assert len(placer.books["a"].on_gpu._prompts) == 0


class TestWholeAnswers:
    """Requests that do not stream, alone on one engine, which computes 2,000 tokens and makes 20 a second."""

    @pytest.fixture
    def placer(self):
        placer = Placer(16)
        placer.add("a", gpu_blocks=100_000)
        return placer

    def serve(self, placer, at, **report):
        chain, output = prompt(at, blocks=20 + 7 * at % 90), 10 + at % 13
        placed = begin(placer, 100.0 * at, chain, streams=False)
        took_s = (chain.n_tokens - report.get("cached_tokens", 0)) / 2000 + output / 20
        placer.answered(100.0 * at + took_s, placed)
        placer.end(100.0 * at + 99.0, placed, chain.n_tokens, Usage(output_tokens=output, **report))

    @pytest.mark.parametrize("report", [{}, {"cached_tokens": 160}])
    def test_teach_rates_and_how_long_answers_take(self, placer, report):
        for at in range(MIN_ANSWERS):
            assert not placer.rates.learned
            self.serve(placer, at, **report)
        assert placer.rates.prefill_s(2000) == pytest.approx(1.0)
        assert placer.demand.answers.mean == pytest.approx((10 + 15 % 13) / 20)

    def test_an_engine_that_times_itself_is_believed(self, placer):
        self.serve(placer, 1, prefill=(1000, 0.25))
        assert (placer.rates.prefill_s(1000), placer.rates.fit) == (pytest.approx(0.25), None)

    def test_its_first_tokens_count_no_more_once_it_has(self, placer):
        """They may have waited in a slot's queue."""
        for at in range(4):
            placed = begin(placer, 100.0 * at, prompt(at, blocks=63))
            placer.first_token(100.0 * at + 50, placed)
            placer.end(100.0 * at + 60, placed, 1009, Usage(prefill=(1000, 0.25)))
        assert placer.rates.prefill_s(1000) == pytest.approx(0.25)
        assert placer.rates.samples == 5, "one of them came before its first report"


class TestSessions:
    def test_break_ties_only(self, placer):
        home, _ = serve(placer, 0.0, prompt(1, blocks=3), session="s")
        other, _ = serve(placer, 10.0, prompt(2, blocks=3), session="t")
        assert {home, other} == {"a", "b"}
        assert (placer.last_engine("s"), placer.last_engine("t")) == (home, other)
        for now, queue_s, expected in ((20.0, 0.0, home), (20.0, 0.01, other)):
            placer.books[home].ledger.begin(now, queue_s, Work(0))
            told = [placer.candidate(now, name, is_last=name == home) for name in placer.books]
            assert placer.place(now, told, prompt(3)).engine == expected

    def test_follow_their_last_request_and_are_bounded(self, placer, monkeypatch):
        monkeypatch.setattr(module, "MAX_SESSIONS", 2)
        for engine, session in (("a", 1), ("b", 2), ("b", 1), ("a", 3)):
            begin(placer, 0.0, prompt(1), engine, session=session)
        assert [placer.last_engine(session) for session in (1, 2, 3, None)] == ["b", None, "a", None]


PROMPTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(10, 60)), min_size=30, max_size=45
)


class Race:
    """Engines that compute one prompt after the other, so many tokens a second each, and what is asked."""

    def __init__(self, *rates):
        self.placer = Placer(16)
        self.rates = {f"e{at}": rate for at, rate in enumerate(rates)}
        for name in self.rates:
            self.placer.add(name)
        self.free_at = dict.fromkeys(self.rates, 0.0)
        self.due = []
        self.given = Counter()

    def run(self, prompts, gap_s):
        """Prompts of a shared beginning, by name and length, and blocks of their own."""
        for at, (name, shared, own) in enumerate(prompts):
            chain = prompt(name, shared + own)
            hashes = (*chain.hashes[:shared], *(10**6 + 1000 * at + block for block in range(own)))
            self.ask(at * gap_s, Chain(hashes, chain.n_tokens, 16))
        return self.given

    def ask(self, now, chain):
        while self.due and self.due[0][0] <= now:
            then, _, placed, placement = heappop(self.due)
            self.placer.first_token(then, placed)
            self.placer.index.store(placement.engine, Tier.GPU, placed.chain.hashes)
            self.placer.end(then, placed, placement.uncached_tokens)
            self.placer.settled(placed)
        placement = place(self.placer, now, chain)
        name = placement.engine
        placed = begin_at(self.placer, now, placement, chain)
        seconds = placement.uncached_tokens / self.rates[name]
        self.free_at[name] = max(self.free_at[name], now) + seconds
        heappush(self.due, (self.free_at[name], self.given.total(), placed, placement))
        self.given[name] += 1


class TestNobodyStarves:
    @given(PROMPTS)
    def test_not_even_a_slow_engine(self, prompts):
        race = Race(4000.0, 4000.0, 1000.0)
        served = race.run(prompts, 0.02 / 3)
        assert served["e2"] >= 1

    @given(st.integers(1, 8), st.integers(1, 60))
    def test_without_load_or_cache_they_take_turns(self, engines, blocks):
        race = Race(*[4000.0] * engines)
        served = race.run([(at, 0, blocks) for at in range(3 * engines)], 10.0)
        assert set(served.values()) == {3}


def test_sessions_that_another_has_seen_are_older(monkeypatch):
    monkeypatch.setattr(module, "MAX_SESSIONS", 3)
    placer = Placer(16)
    placer._note("new", "a")
    placer.note_earlier("new", "b")
    placer.note_earlier("old", "b")
    placer.note_earlier("older", "a")
    placer.note_earlier("one too many", "a")
    assert placer.recent_sessions(9) == [("new", "a"), ("old", "b"), ("older", "a")]
    assert placer.recent_sessions(1) == [("new", "a")]


class TestPairs:
    """One engine computes a prompt for another one."""

    @pytest.fixture
    def pair(self, placer):
        """The two legs of one request, begun."""
        chain = prompt(1)
        legs = [
            placer.begin(0.0, name, Work(161), chain, part=part, session=session)
            for name, part, session in (("a", Role.PREFILL, None), ("b", Role.DECODE, "s"))
        ]
        return chain, *legs

    def test_are_chosen_where_engines_may_prefill(self, placer):
        chain = prompt(1)
        placer.begin(0.0, "b", Work(400_000), prompt(2))
        a, b = (placer.candidate(0.0, name) for name in "ab")
        placement = placer.place(0.0, [b], chain, placer.prefillers(0.0, [a], {"b"}))
        assert (placement.engine, placement.chosen.prefiller) == ("b", "a")
        assert placer.place(0.0, [b], chain).pair is None
        assert placer.place(0.0, [b], None, placer.prefillers(0.0, [a], {"b"})).rule == "least loaded"

    def test_the_prompt_is_work_and_pending_where_it_is_computed(self, placer, pair):
        chain, _, _ = pair
        matches = placer.match(chain)
        assert {name: match.pending for name, match in matches.items()} == {"a": 10}
        views = {name: placer.books[name].ledger.view(0.0) for name in "ab"}
        assert (views["a"].queue_s > 0, views["a"].decoding) == (True, 0)
        assert (views["b"].queue_s, views["b"].in_flight, views["b"].decoding) == (0, 1, 0)
        assert placer.books["b"].in_use.blocks == 10, "the memory for it is reserved at once"
        assert placer.last_engine("s") == "b"

    def test_a_prefill_is_charged_for_requests_whose_kv_a_full_engine_awaits(self, placer, pair):
        _, _, decode = pair
        full = placer.books["b"].in_use
        full.capacity = full.blocks

        def stall_s():
            a, b = (placer.candidate(1.0, name) for name in "ab")
            pairs = placer.prefillers(1.0, [a], {"b"})
            meanwhile_s = placer.rates.prefill_s(161) ** 2 / 2 * pairs.arrivals("b")
            return placer.place(1.0, [b], prompt(2), pairs).costs[0].stall_s - meanwhile_s

        assert stall_s() == pytest.approx(placer.rates.prefill_s(161)), "it waits for all of the prefill"
        placer.first_token(1.0, decode)
        assert stall_s() == pytest.approx(STALL * placer.rates.prefill_s(161)), "from now on it is a stream"

    def test_the_second_engine_may_have_to_compute_the_prompt(self, placer, pair):
        chain, prefill, decode = pair
        placer.end(1.0, prefill, None)
        placer.settled(prefill)
        placer.computes(1.0, decode, Work(161))
        assert {name: match.pending for name, match in placer.match(chain).items()} == {"b": 10}
        assert placer.books["b"].ledger.view(1.0).queue_s > 0
        placer.first_token(1.5, decode)
        placer.end(2.0, decode, 161)
        placer.settled(decode)
        assert placer.match(chain) == {}
        assert placer.demand._made == 10
