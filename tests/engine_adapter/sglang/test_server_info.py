import pytest

from engine_adapter.errors import EngineUnavailable
from engine_adapter.sglang.server_info import read_server_info

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


def read(*, api_key=None, **fields):
    return read_server_info(SERVER | fields, MODELS, api_key=api_key)


def test_what_a_server_says():
    info = read()
    assert (info.model, info.loras, info.max_model_len) == ("m", {"ad"}, 4096)
    assert (info.page_size, info.capacity_tokens, info.tokenizer) == (64, 6400, "hub/tokenizer")
    assert (info.release, info.dp_ranks, info.radix_cache, info.lora) == ((0, 5, 23), 1, True, True)
    assert not info.cache_report
    assert "secret" not in repr(info)


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
    ("fields", "ranks"),
    [
        ({"kv_events": PUBLISHER | {"dp_size": 4}}, 4),
        ({"kv_events": None, "dp_size": 2}, 2),
        ({"kv_events": None, "dp_size": 1, "attn_dp_size": 8}, 8),
    ],
)
def test_ranks(fields, ranks):
    assert read(**fields).dp_ranks == ranks


def test_a_page_without_events():
    assert read(kv_events=None).page_size == 64
    assert read(kv_events=None, dcp_size=2).page_size == 128
    assert read(kv_events=None, page_size=None).page_size is None


@pytest.mark.parametrize(
    ("fields", "ratio"),
    [
        ({"hicache_ratio": 2.0}, 0.0),
        ({"hicache_ratio": 2.0, "enable_hierarchical_cache": True}, 2.0),
        ({"hicache_ratio": 2.0, "hicache_size": 40, "enable_hierarchical_cache": True}, 0.0),
        ({"hicache_ratio": None, "enable_hierarchical_cache": True}, 0.0),
    ],
)
def test_the_host_pool(fields, ratio):
    info = read(**fields)
    assert info.host_ratio == ratio
    assert info.hicache is fields.get("enable_hierarchical_cache", False)


@pytest.mark.parametrize(
    ("version", "form", "salts", "adapters"),
    [
        ("0.5.17", "default", False, False),
        ("0.5.18", "default", True, False),
        ("0.5.22.post1", "default", True, False),
        ("0.5.22", "dynamo", True, True),
        ("0.5.21", "dynamo", True, False),
        ("0.5.23", "default", True, True),
        ("0.6.0rc1", "default", True, True),
        ("unknown", "default", False, False),
    ],
)
def test_what_events_of_a_version_tell(version, form, salts, adapters):
    info = read(version=version, kv_events_config=f'{{"format": "{form}"}}')
    assert (info.events_carry_salts, info.events_carry_lora) == (salts, adapters)


@pytest.mark.parametrize(
    ("name", "pairs"), [(None, False), ("EAGLE3", True), ("NEXTN", True), ("NGRAM", False)]
)
def test_speculation_that_pairs_tokens(name, pairs):
    assert read(speculative_algorithm=name).pairs_tokens is pairs


@pytest.mark.parametrize(
    ("server_key", "key", "lacks"),
    [(None, None, False), ("a", None, True), ("a", "b", True), ("a", "a", False)],
)
def test_whether_the_admin_key_is_known(server_key, key, lacks):
    assert read(admin_api_key=server_key, api_key=key).lacks_admin_key is lacks


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
