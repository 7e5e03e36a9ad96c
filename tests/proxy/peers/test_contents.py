from engine_adapter import Tier
from proxy.core.audit import Trust
from proxy.core.peers.messages import Learned, Sessions, Timed, Told, unpacked
from proxy.core.placement.load import Sample, Work
from proxy.core.placement.rates import Timings
from proxy.fleet.fleet import Fleet
from proxy.peers import contents as contents_module
from proxy.peers.contents import contents
from tests.fakes import add_ready


def test_what_is_learned_and_where_conversations_were_is_told_in_parts(monkeypatch):
    monkeypatch.setattr(contents_module, "PART", 3)
    fleet = Fleet()
    learned, precise = add_ready(fleet, "a"), add_ready(fleet, "b")
    learned.audit.lost("no events")
    precise.audit.synced()
    assert (learned.audit.trust, precise.audit.trust) == (Trust.APPROXIMATE, Trust.PRECISE)
    pool = fleet.pools["m"]
    for chain in ((1, 2), (3, 4), (5,)):
        pool.learn(learned, chain)
    for session in (10, 11, 12, 13):
        pool.placer._note(session, "a")
    pool.placer._note("a name", "a")
    pool.placer.books["a"].rates.learn(Sample(Work(512), 0.5, 0.0))
    timed, first, second, *others = contents(fleet, 9)
    assert timed == Timed(9, "a", Timings([(512, 0.5)], are_blurred=False, answers=[]))
    assert isinstance(first, Learned)
    assert [unpacked(each) for each in first.stretches] == [(5,), (3, 4)]
    assert [unpacked(each) for each in second.stretches] == [(1, 2)]
    *sessions, last = others
    assert all(isinstance(each, Sessions) for each in sessions)
    assert [unpacked(each.digests) for each in sessions] == [(13, 12, 11), (10,)]
    assert last == Told(9)


def test_what_is_adopted_is_older_than_all_that_is_known():
    fleet = Fleet()
    engine = add_ready(fleet, "a", gpu_blocks=4)
    engine.audit.lost("no events")
    pool = fleet.pools["m"]
    pool.learn(engine, (1, 2))
    pool.adopt(engine, (1, 2, 3))
    pool.adopt(engine, (8, 9))
    assert pool.index.held("a", Tier.GPU) == 4  # there is room for one block of the last
    pool.learn(engine, (20,))
    assert not pool.index.holds("a", 8)
    assert all(pool.index.holds("a", block) for block in (1, 2, 3, 20))
    engine.audit.synced()
    pool.adopt(engine, (30,))
    assert not pool.index.holds("a", 30)
