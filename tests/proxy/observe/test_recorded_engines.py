import pytest

from proxy.core.placement.decision import Cost
from proxy.core.placement.load import LoadSample, Work
from proxy.observe.recorder import EngineWatch, seconds_per_token
from proxy.request.records import RequestRecord
from tests.kv_world import KvFake, kv_world
from tests.placements import placement_of


def record(**fields):
    known = {"arrived": 10.0, "placed": 10.5, "first_byte_s": 1.5, "answered_s": 4.0, "output_tokens": 11}
    return RequestRecord("r", 0.0, "/v1/x", "m", None, **{"stream": True} | known | fields)


def test_the_pace_of_a_stream_is_that_after_its_first_token():
    assert seconds_per_token(record()) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": False},
        {"error": "the engine died"},
        {"died": ["e"]},
        {"placed": None},
        {"first_byte_s": None},
        {"answered_s": None},
        {"output_tokens": None},
        {"output_tokens": 7},
    ],
)
def test_other_answers_tell_no_pace(fields):
    assert seconds_per_token(record(**fields)) is None


async def test_what_engines_told_and_what_was_measured(tokenizer_dir):
    async with kv_world(tokenizer_dir) as world:
        world.add(KvFake("a"))
        watch = EngineWatch(world.fleet)
        (unmeasured,) = watch.engines()
        assert (unmeasured.id, unmeasured.model, unmeasured.gpu_tokens) == ("a", "m", 64 * 16)
        assert (unmeasured.prefill, unmeasured.interference, unmeasured.token_s) == ([], None, None)
        assert (unmeasured.host_tokens, unmeasured.restore_tok_s) == (None, None)

        world.pool.placer.books["a"].rates.learn(LoadSample(Work(500), 0.25, 0.0))
        placement = placement_of("a", 0, 100, (Cost("a"),), "lowest cost")
        for _ in range(3):
            watch.observe(record(placement=placement))
        watch.observe(record(placement=placement, output_tokens=None))
        (measured,) = watch.engines()
        assert (measured.prefill, measured.samples) == ([(500, 0.25)], 1)
        assert measured.interference == 0
        assert measured.token_s == pytest.approx(0.2)
