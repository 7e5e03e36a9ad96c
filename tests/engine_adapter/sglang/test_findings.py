import pytest

from engine_adapter.sglang.adapter import event_endpoints, find
from engine_adapter.sglang.server_info import ServerInfo, read_server_info
from tests.engines import engine_spec

WITHOUT_REPLAY = {"endpoint_host": "*", "endpoint_port_base": 5557, "block_size": 16}
PUBLISHER = WITHOUT_REPLAY | {"replay_endpoint_port_base": 5657}
WELL = {
    "version": "0.5.23",
    "page_size": 16,
    "max_total_num_tokens": 1600,
    "kv_events": PUBLISHER,
    "enable_cache_report": True,
    "enable_hierarchical_cache": True,
}


def server(loras=(), **fields) -> ServerInfo:
    """One that reports these fields beside those of `WELL`."""
    adapters = [{"id": name, "parent": "m"} for name in loras]
    return read_server_info(WELL | fields, {"data": [{"id": "m", "max_model_len": 4096}, *adapters]})


def swa(tokens):
    return {"internal_states": [{"memory_usage": {"token_capacity_swa": tokens}}]}


def spec(url="http://gpu7:30000", **fields):
    return engine_spec("sglang", url, **fields)


def found(described=None, *, jinja=True, tokenizes=True, window=None, **fields):
    info = server(**fields)
    _, of_events = event_endpoints(info, described or spec())
    return tuple(find(info, of_events, jinja=jinja, tokenizes=tokenizes, window=window))


def test_nothing_stands_in_the_way():
    assert found() == found(version="0.5.20", enable_lora=False) == ()


@pytest.mark.parametrize(
    ("fields", "problem", "remedy"),
    [
        ({"disable_radix_cache": True}, "reuses no prefixes", "without --disable-radix-cache"),
        ({"kv_events": None, "page_size": None}, "page size", ""),
        ({"kv_events": PUBLISHER | {"dp_size": 2}}, "2 data-parallel ranks", "dp_rank=0 to 1"),
        ({"speculative_algorithm": "EAGLE"}, "pairs of tokens", ""),
        ({"version": "0.5.17"}, "do not carry cache salts", "use 0.5.18 or later"),
        ({"version": "0.5.20", "enable_lora": True}, "do not carry LoRA", "use 0.5.23 or later"),
        ({"kv_events": None}, "publishes no KV events", "start it with --kv-events-config"),
        (
            {"kv_events": PUBLISHER | {"endpoint_host": "10.0.0.9"}},
            "tcp://10.0.0.9:5557 cannot be reached from here",
            '"endpoint": "tcp://*:5557"',
        ),
        (
            {
                "kv_events": PUBLISHER | {"endpoint_host": "127.0.0.1"},
                "kv_events_config": '{"bind": true}',
            },
            "cannot be reached from here",
            '"endpoint": "tcp://*:5557"',
        ),
    ],
)
def test_why_events_do_not_fit(fields, problem, remedy):
    (finding,) = found(**fields)
    assert problem in finding.problem
    assert remedy in finding.remedy
    assert event_endpoints(server(**fields), spec()) == (None, finding)


@pytest.mark.parametrize(
    ("fields", "options", "problem", "remedy"),
    [
        (
            {"kv_events": WITHOUT_REPLAY},
            {},
            "without a replay socket",
            '"replay_endpoint": "tcp://*:5657"',
        ),
        ({"enable_cache_report": False}, {}, "does not report cached tokens", "--enable-cache-report"),
        ({"enable_hierarchical_cache": False}, {}, "evicts is lost", "--enable-hierarchical-cache"),
        ({}, {"tokenizes": False, "jinja": False}, "does not tokenise chats", ""),
        ({}, {"jinja": False}, "tokenised twice", ""),
        ({"completion_template": "t"}, {}, "text completions", "--completion-template"),
        ({"admin_api_key": "hush"}, {}, "cannot be flushed", "--api-key"),
    ],
)
def test_what_else_there_is(fields, options, problem, remedy):
    (finding,) = found(**fields, **options)
    assert problem in finding.problem
    assert remedy in finding.remedy
    assert event_endpoints(server(**fields), spec())[0] is not None


WINDOWS = {**swa(1600), "enable_hierarchical_cache": False}


@pytest.mark.parametrize(
    ("fields", "window", "problem", "remedy"),
    [
        ({"uses_mamba_radix_cache": True}, None, "which states", ""),
        (WINDOWS | {"uses_mamba_radix_cache": True}, 128, "which states", ""),
        (WINDOWS | {"enable_hierarchical_cache": True}, None, "on the host tier", ""),
        (
            WINDOWS | {"kv_events": PUBLISHER | {"block_size": 1}},
            None,
            "pages are too small",
            "--page-size 16",
        ),
        (WINDOWS, None, "how long its sliding windows are", "tokenizer=DIR"),
        (WINDOWS | swa(1599), 128, "once 1599 tokens", "--swa-full-tokens-ratio 1"),
    ],
)
def test_why_a_hybrid_model_is_not_followed_exactly(fields, window, problem, remedy):
    *_, finding = found(**fields, window=window)
    assert problem in finding.problem
    assert "may reuse less than predicted" in finding.problem
    assert remedy in finding.remedy
    assert event_endpoints(server(**fields), spec())[0] is not None
    assert len(found(**fields | {"disable_radix_cache": True}, window=window)) <= 2


def test_a_hybrid_model_that_is_followed_exactly_has_no_finding():
    assert found(**WINDOWS, window=128) == found(enable_hierarchical_cache=False)


def test_addresses_the_operator_gives_stand_for_the_servers_own():
    assert found(spec(events="tcp://a:1", replay="tcp://a:2"), kv_events=None) == ()
    (finding,) = found(spec(events="tcp://a:1"))
    assert "without a replay socket" in finding.problem
    assert found(spec(replay="tcp://a:2"), kv_events=WITHOUT_REPLAY) == ()
    assert found(spec(dp_rank=1), kv_events=PUBLISHER | {"dp_size": 2}) == ()
