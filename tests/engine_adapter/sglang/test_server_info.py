from contextlib import aclosing

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from engine_adapter import EngineSpec, EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.sglang.server_info import Loads, read_server_info
from tests.engines import served

PUBLISHER = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "block_size": 64}
MODELS = {"data": [{"id": "m", "parent": None, "max_model_len": 4096}, {"id": "ad", "parent": "m"}]}
SERVER = {
    "version": "0.5.23",
    "max_total_num_tokens": 6400,
    "page_size": 64,
    "tokenizer_path": "hub/tokenizer",
    "served_model_name": "m",
    "random_seed": 7,
    "startup_time": {"load_weight": 1.5},
    "api_key": "secret",
    "kv_events": PUBLISHER,
}


HICACHE = {"enable_hierarchical_cache": True}


def read(*, api_key=None, **fields):
    return read_server_info(SERVER | fields, MODELS, api_key=api_key)


def test_what_a_server_says():
    info = read()
    assert (info.served.name, info.served.loras, info.served.max_model_len) == ("m", {"ad"}, 4096)
    assert (info.page_size, info.capacity_tokens, info.tokenizer) == (64, 6400, "hub/tokenizer")
    assert (info.release, info.dp_ranks, info.radix_cache, info.lora) == ((0, 5, 23), 1, True, True)
    assert not info.cache_report
    assert "secret" not in repr(info)


def test_the_longest_prompt_of_a_server_that_cuts_longer_ones():
    told = [read(**more, max_req_input_len=4090) for more in ({}, {"allow_auto_truncate": True})]
    assert [(info.cuts_prompts, info.max_model_len) for info in told] == [(False, 4096), (True, 4090)]
    assert read(allow_auto_truncate=True).max_model_len == 4096


def test_several_kinds_of_attention():
    memory = {"memory_usage": {"token_capacity": 6400, "token_capacity_swa": 5120}}
    windows = read(internal_states=[memory, memory])
    assert (windows.window_tokens, windows.is_hybrid, windows.follows_windows) == (5120, True, True)
    assert windows.drops_windows
    states = read(uses_mamba_radix_cache=True)
    assert (states.keeps_states, states.is_hybrid, states.follows_windows) == (True, True, False)
    for none in ([], [{}], [{"memory_usage": {}}], [{"memory_usage": {"token_capacity_swa": None}}]):
        assert not read(internal_states=none).is_hybrid


def test_a_process_is_told_from_the_next():
    assert read().instance == read().instance
    others = [read(startup_time={"load_weight": 1.6}), read(random_seed=8), read(version="0.5.22")]
    assert len({info.instance for info in (read(), *others)}) == 4


def test_events_are_one_port_a_rank():
    publisher = read(kv_events=PUBLISHER | {"dp_size": 2, "replay_endpoint_port_base": 5657}).publisher
    assert publisher.endpoints(0) == ("tcp://*:5557", "tcp://*:5657")
    assert publisher.endpoints(1) == ("tcp://*:5558", "tcp://*:5658")
    assert read().publisher.endpoints(1) == ("tcp://*:5558", None)
    assert read(kv_events=None).publisher is None


@pytest.mark.parametrize(
    ("host", "config", "binds"),
    [
        ("*", None, True),
        ("[::]", "{}", True),
        ("10.0.0.9", "{}", False),
        ("10.0.0.9", '{"bind": true}', True),
        ("*", '{"bind": false}', False),
        ("*", "no json", True),
    ],
)
def test_a_publisher_that_connects_elsewhere_is_told_from_one_that_binds(host, config, binds):
    info = read(kv_events=PUBLISHER | {"endpoint_host": host}, kv_events_config=config)
    assert info.publisher.binds is binds


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"kv_events": PUBLISHER | {"dp_size": 4}}, "dp_ranks", 4),
        ({"kv_events": None, "dp_size": 2}, "dp_ranks", 2),
        ({"kv_events": None, "dp_size": 1, "attn_dp_size": 8}, "dp_ranks", 8),
        ({"kv_events": None}, "page_size", 64),
        ({"kv_events": None, "dcp_size": 2}, "page_size", 128),
        ({"kv_events": None, "page_size": None}, "page_size", None),
        ({"hicache_ratio": 2.0}, "host_ratio", 0.0),
        ({"hicache_ratio": 2.0}, "hicache", False),
        (HICACHE | {"hicache_ratio": 2.0}, "host_ratio", 2.0),
        (HICACHE | {"hicache_ratio": 2.0}, "hicache", True),
        (HICACHE | {"hicache_ratio": 2.0, "hicache_size": 40}, "host_ratio", 0.0),
        (HICACHE | {"hicache_ratio": None}, "host_ratio", 0.0),
        ({"speculative_algorithm": None}, "pairs_tokens", False),
        ({"speculative_algorithm": "EAGLE3"}, "pairs_tokens", True),
        ({"speculative_algorithm": "NEXTN"}, "pairs_tokens", True),
        ({"speculative_algorithm": "NGRAM"}, "pairs_tokens", False),
        ({"admin_api_key": None}, "lacks_admin_key", False),
        ({"admin_api_key": "a"}, "lacks_admin_key", True),
        ({"admin_api_key": "a", "api_key": "b"}, "lacks_admin_key", True),
        ({"admin_api_key": "a", "api_key": "a"}, "lacks_admin_key", False),
    ],
)
def test_how_a_server_was_started(fields, name, value):
    assert getattr(read(**fields), name) == value


@pytest.mark.parametrize(
    ("version", "form", "salts", "adapters"),
    [
        ("0.5.17", "default", False, False),
        ("0.5.18", "default", True, False),
        ("0.5.22", "dynamo", True, True),
        ("0.5.21", "dynamo", True, False),
        ("0.5.23", "default", True, True),
        ("unknown", "default", False, False),
    ],
)
def test_what_events_of_a_version_tell(version, form, salts, adapters):
    info = read(version=version, kv_events_config=f'{{"format": "{form}"}}')
    assert (info.events_carry_salts, info.events_carry_lora) == (salts, adapters)


@pytest.mark.parametrize(
    ("server", "models"),
    [
        ({"engine": "another"}, MODELS),
        ([], MODELS),
        (SERVER | {"page_size": "64"}, MODELS),
        (SERVER, {"models": []}),
        (SERVER, {"data": []}),
    ],
)
def test_another_server(server, models):
    with pytest.raises(EngineUnavailable):
        read_server_info(server, models)


LOADS = "/v1/loads"
RANK = {
    "dp_rank": 0,
    "num_running_reqs": 2,
    "num_waiting_reqs": 1,
    "token_usage": 0.25,
    "cache_hit_rate": 0.5,
}
OTHER = RANK | {"dp_rank": 1, "token_usage": 0.75, "cache_hit_rate": 1.0}


@pytest.fixture
def told():
    """The answers of a server by their routes, which a test changes; it has no other route."""
    return {}


@pytest.fixture
async def loads(told):
    """`loads(rank)` reads the load of that server."""

    def answer(request):
        answer = told.get(request.url.path)
        return JSONResponse(answer, 404 if answer is None else 200)

    with served(Starlette(routes=[Route("/{path:path}", answer)])) as url:
        async with aclosing(ControlClient(EngineSpec("sglang", url, "e"))) as control:
            yield lambda dp_rank=None: Loads(control, dp_rank)


async def test_of_one_rank_and_of_all_together(told, loads):
    told[LOADS] = {"loads": [RANK, OTHER]}
    every, one = loads(), loads(1)
    load = await every.read()
    assert (load.running, load.waiting, load.gpu_usage, every.cache_hit_rate) == (4, 2, 0.75, 0.75)
    load = await one.read()
    assert (load.running, load.waiting, load.gpu_usage, one.cache_hit_rate) == (2, 1, 0.75, 1.0)


async def test_a_rank_that_is_not_there(told, loads):
    told[LOADS] = {"loads": [RANK]}
    with pytest.raises(EngineUnavailable, match="no dp_rank 3"):
        await loads(3).read()
    told[LOADS] = {"loads": []}
    with pytest.raises(EngineUnavailable, match="does not report its load"):
        await loads().read()


async def test_a_count_that_falls_means_another_process(told, loads):
    reader = loads()
    for count in (100, 100, 130):
        told[LOADS] = {"loads": [RANK | {"total_prefill_uncached_tokens": count}]}
        await reader.read()
    told[LOADS] = {"loads": [RANK | {"total_prefill_uncached_tokens": 40}]}
    with pytest.raises(EngineUnavailable, match="restarted"):
        await reader.read()
    reader.forget()
    await reader.read()


async def test_a_server_of_old(told, loads):
    told["/get_load"] = [{"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 9}]
    reader = loads()
    for _ in range(2):
        load = await reader.read()
        assert (load.running, load.waiting, load.gpu_usage, reader.cache_hit_rate) == (2, 1, None, None)
