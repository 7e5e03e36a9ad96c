from math import inf, nan

import pytest

from proxy.replay.engine import EngineModel
from proxy.replay.options import OptionError, engine_models, plan
from proxy.replay.plan import Target
from proxy.replay.registry import POLICIES


def test_what_is_not_said_is_what_the_model_says():
    assert engine_models(gpu_tokens="500k") == (EngineModel(500_000),)


def test_several_sizes():
    models = engine_models(gpu_tokens="2M,500k,2M", host_tokens="9M")
    assert models == (EngineModel(2_000_000, 9_000_000), EngineModel(500_000, 9_000_000))


def test_all_of_an_engine():
    assert engine_models(
        gpu_tokens="40GiB",
        host_tokens="2M",
        bytes_per_token="128KiB",
        model="chunked",
        prefill_rate="8k",
        restore_rate="90k",
        context_tokens="64k",
        chunk_tokens="8192",
        decode_step_ms=20,
        decode_stream_ms=0.5,
    ) == (
        EngineModel(
            327_680,
            2_000_000,
            8000,
            90_000,
            64_000,
            chunked=True,
            chunk_tokens=8192,
            step_s=0.02,
            stream_s=0.0005,
        ),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_tokens": "x"}, "--gpu-tokens: 'x' is not an amount"),
        ({"gpu_tokens": "0"}, "--gpu-tokens 0: must be 1 or more"),
        ({"host_tokens": "1GiB"}, "--host-tokens: '1GiB' is in bytes: give --bytes-per-token"),
        ({"bytes_per_token": "0"}, "--bytes-per-token 0: must be 1 or more"),
        ({"model": "lifo"}, "--model 'lifo': must be fifo or chunked"),
        ({"prefill_rate": "2MB"}, "--prefill-rate: '2MB' is in bytes"),
        ({"decode_step_ms": 0.0, "decode_stream_ms": 0.0}, "one of them must be more than 0"),
        ({"decode_step_ms": nan}, "--decode-step-ms nan: must be a number, 0 or more"),
        ({"decode_stream_ms": inf}, "--decode-stream-ms inf: must be a number, 0 or more"),
        ({"decode_step_ms": -1.0}, "--decode-step-ms -1: must be a number, 0 or more"),
    ],
)
def test_engines_that_cannot_be(options, message):
    with pytest.raises(OptionError) as told:
        engine_models(**{"gpu_tokens": "1k", **options})
    assert message in str(told.value)


def test_a_plan():
    models = (EngineModel(1000), EngineModel(2000))
    made = plan(models, engines="4,8,4", policies="all", seeds="0,1", load=0.9)
    assert (made.models, made.engines, made.seeds) == (models, (4, 8), (0, 1))
    assert (made.load, made.speedup) == (0.9, 1.0)
    assert made.policies == (*POLICIES, "oracle")
    assert plan(models, speedup=2.0).speedup == 2.0


def test_a_plan_that_searches():
    made = plan((EngineModel(1000),), target_p99=2.0, max_engines=9)
    assert (made.engines, made.policies, made.target) == ((), ("kvpin",), Target(2.0, 9))
    assert plan((EngineModel(1000),), target_p99=2.0, policies="all").policies == tuple(POLICIES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_p99": 0.0}, "--target-p99 0: must be a number, more than 0"),
        ({"target_p99": 1.0, "engines": "4"}, "bound it by --max-engines"),
        ({"target_p99": 1.0, "load": 0.9}, "say --speedup instead"),
        ({"target_p99": 1.0, "policies": "oracle"}, "--target-p99: the policy oracle has no times"),
        ({"load": 0.9, "speedup": 2.0}, "give one of them"),
        ({"load": 0.0}, "--load 0: must be a number, more than 0"),
        ({"load": nan}, "--load nan: must be a number, more than 0"),
        ({"speedup": inf}, "--speedup inf: must be a number, more than 0"),
        ({"speedup": -1.0}, "--speedup -1: must be a number, more than 0"),
        ({"policies": "kvpin,best"}, "--policies: there is no policy 'best'"),
        ({"engines": "4,0"}, "--engines 0: must be 1 or more"),
        ({"seeds": "a"}, "--seeds: 'a' is not an amount"),
    ],
)
def test_plans_that_cannot_be(options, message):
    with pytest.raises(OptionError) as told:
        plan((EngineModel(1000),), **options)
    assert message in str(told.value)


def test_a_search_is_for_one_size():
    with pytest.raises(OptionError, match="engines of one size"):
        plan((EngineModel(1000), EngineModel(2000)), target_p99=1.0)
