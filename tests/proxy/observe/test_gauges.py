from prometheus_client.parser import text_string_to_metric_families

from engine_adapter import Tier
from proxy.core.placement.load import Work
from proxy.core.quotas import ByteBudget
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.observe.gauges import ScrapedState, gauges_of
from tests.fakes import INFO, FakeAdapter


def values(fleet):
    page = "".join(gauges_of(ScrapedState(fleet, {}, None, ByteBudget(0))))
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


async def test_gauges_are_read_from_the_fleet():
    fleet = Fleet()
    engine = fleet.add(FakeAdapter("a"))
    assert values(fleet)["kvpin_engine_ready", "a"] == 0
    pool = fleet.join(engine, INFO)
    engine.state = EngineState.READY
    engine.audit.synced()
    engine.ledger.begin(0.0, 1.0, Work(10))
    pool.index.store("a", Tier.GPU, [1, 2])
    pool.index.store("a", Tier.HOST, [2])
    now = values(fleet)
    assert now["kvpin_engine_ready", "a"] == 1
    assert now["kvpin_engine_precise", "a"] == 1
    assert now["kvpin_engine_in_flight", "a"] == 1
    assert now["kvpin_engine_blocks", "a", "gpu"] == 2
    assert now["kvpin_engine_blocks", "a", "host"] == 1
    assert now["kvpin_index_entries", "m"] == 2
    assert now["kvpin_engine_draining", "a"] == 0
    engine.state = EngineState.DRAINING
    now = values(fleet)
    assert (now["kvpin_engine_ready", "a"], now["kvpin_engine_draining", "a"]) == (0, 1)
