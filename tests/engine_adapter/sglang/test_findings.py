import pytest

from engine_adapter.sglang.adapter import find, why_events_do_not_fit
from engine_adapter.sglang.server_info import EventSockets, ServerInfo
from tests.engines import engine_spec

PUBLISHER = EventSockets("*", 5557, 5657, "", binds=True)
WELL = {
    "version": "0.5.23",
    "instance": "i",
    "model": "m",
    "loras": frozenset(),
    "max_model_len": 4096,
    "tokenizer": "t",
    "page_size": 16,
    "capacity_tokens": 1600,
    "publisher": PUBLISHER,
    "cache_report": True,
    "hicache": True,
}


def spec(url="http://gpu7:30000", **fields):
    return engine_spec("sglang", url, **fields)


def found(described=None, *, jinja=True, tokenizes=True, window=None, **fields):
    info = ServerInfo(**WELL | fields)
    return find(info, described or spec(), jinja=jinja, tokenizes=tokenizes, window=window)


def test_nothing_stands_in_the_way():
    assert found() == ()


@pytest.mark.parametrize(
    ("fields", "problem", "remedy"),
    [
        ({"radix_cache": False}, "reuses no prefixes", "without --disable-radix-cache"),
        ({"page_size": None}, "page size", ""),
        ({"dp_ranks": 2}, "2 data-parallel ranks", "dp_rank=0 to 1"),
        ({"speculative": "EAGLE"}, "pairs of tokens", ""),
        ({"version": "0.5.17"}, "do not carry cache salts", "use 0.5.18 or later"),
        ({"version": "0.5.20", "lora": True}, "do not carry LoRA", "use 0.5.23 or later"),
        ({"publisher": None}, "publishes no KV events", "start it with --kv-events-config"),
        (
            {"publisher": EventSockets("10.0.0.9", 5557, None, "", binds=False)},
            "tcp://10.0.0.9:5557 cannot be reached from here",
            '"endpoint": "tcp://*:5557"',
        ),
        (
            {"publisher": EventSockets("127.0.0.1", 5557, None, "", binds=True)},
            "cannot be reached from here",
            '"endpoint": "tcp://*:5557"',
        ),
    ],
)
def test_why_events_do_not_fit(fields, problem, remedy):
    (finding,) = found(**fields)
    assert problem in finding.problem
    assert remedy in finding.remedy
    assert why_events_do_not_fit(ServerInfo(**WELL | fields), spec()) == finding


@pytest.mark.parametrize(
    ("fields", "options", "problem", "remedy"),
    [
        (
            {"publisher": EventSockets("*", 5557, None, "", binds=True)},
            {},
            "without a replay socket",
            '"replay_endpoint": "tcp://*:5657"',
        ),
        ({"cache_report": False}, {}, "does not report cached tokens", "--enable-cache-report"),
        ({"hicache": False}, {}, "evicts is lost", "--enable-hierarchical-cache"),
        ({}, {"tokenizes": False, "jinja": False}, "does not tokenise chats", ""),
        ({}, {"jinja": False}, "tokenised twice", ""),
        ({"completion_template": True}, {}, "text completions", "--completion-template"),
        ({"lacks_admin_key": True}, {}, "cannot be flushed", "--api-key"),
    ],
)
def test_what_else_there_is(fields, options, problem, remedy):
    (finding,) = found(**fields, **options)
    assert problem in finding.problem
    assert remedy in finding.remedy
    assert why_events_do_not_fit(ServerInfo(**WELL | fields), spec()) is None


WINDOWS = {"window_tokens": 1600, "hicache": False}


@pytest.mark.parametrize(
    ("fields", "window", "problem", "remedy"),
    [
        ({"keeps_states": True}, None, "which states", ""),
        (WINDOWS | {"keeps_states": True}, 128, "which states", ""),
        (WINDOWS | {"hicache": True}, None, "on the host tier", ""),
        (WINDOWS | {"page_size": 1}, None, "pages are too small", "--page-size 16"),
        (WINDOWS, None, "how long its sliding windows are", "tokenizer=DIR"),
        (WINDOWS | {"window_tokens": 1599}, 128, "once 1599 tokens", "--swa-full-tokens-ratio 1"),
    ],
)
def test_why_a_hybrid_model_is_not_followed_exactly(fields, window, problem, remedy):
    *_, finding = found(**fields, window=window)
    assert problem in finding.problem
    assert "may reuse less than predicted" in finding.problem
    assert remedy in finding.remedy
    assert why_events_do_not_fit(ServerInfo(**WELL | fields), spec()) is None
    assert len(found(**fields | {"radix_cache": False}, window=window)) <= 2


def test_a_hybrid_model_that_is_followed_exactly_has_no_finding():
    assert found(**WINDOWS, window=128) == found(hicache=False)


def test_addresses_the_operator_gives_stand_for_the_servers_own():
    assert found(spec(events="tcp://a:1", replay="tcp://a:2"), publisher=None) == ()
    (finding,) = found(spec(events="tcp://a:1"))
    assert "without a replay socket" in finding.problem
    assert found(spec(replay="tcp://a:2"), publisher=EventSockets("*", 5557, None, "", binds=True)) == ()
    assert found(spec(dp_rank=1), dp_ranks=2) == ()
