from math import inf, nan
from pathlib import Path

import pytest

from proxy.cli.replay_options import ReplayOptionError, ReplayOptions
from proxy.replay.engine import EngineModel
from proxy.replay.plan import P99Target
from proxy.replay.registry import POLICIES


def test_what_is_not_said_is_what_the_model_says():
    assert ReplayOptions().models() == (EngineModel(500_000),)


def test_several_sizes():
    models = ReplayOptions(gpu_tokens="2M,500k,2M", host_tokens="9M").models()
    assert models == (EngineModel(2_000_000, 9_000_000), EngineModel(500_000, 9_000_000))


def test_all_of_an_engine():
    options = ReplayOptions(
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
    )
    assert options.models() == (
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
    with pytest.raises(ReplayOptionError) as told:
        ReplayOptions(**options).models()
    assert message in str(told.value)


def test_a_plan():
    options = ReplayOptions(gpu_tokens="1k,2k", engines="4,8,4", policies="all", seeds="0,1", load=0.9)
    made = options.plan()
    assert (made.models, made.engines, made.seeds) == (options.models(), (4, 8), (0, 1))
    assert (made.load, made.speedup) == (0.9, 1.0)
    assert made.policies == (*POLICIES, "oracle")
    assert ReplayOptions(speedup=2.0).plan().speedup == 2.0


def test_a_plan_that_searches():
    made = ReplayOptions(target_p99=2.0, max_engines=9).plan()
    assert (made.engines, made.policies, made.target) == ((), ("kvpin",), P99Target(2.0, 9))
    assert ReplayOptions(target_p99=2.0, policies="all").plan().policies == tuple(POLICIES)


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
    with pytest.raises(ReplayOptionError) as told:
        ReplayOptions(**options).plan()
    assert message in str(told.value)


def test_a_search_is_for_one_size():
    with pytest.raises(ReplayOptionError, match="engines of one size"):
        ReplayOptions(gpu_tokens="1k,2k", target_p99=1.0).plan()


def test_files_that_are_written():
    assert ReplayOptions(json_path=Path("-"), html_path=Path("x")).paths == [Path("-"), Path("x")]
