"""What a vLLM says of how it passes KV on, and what kvpin makes of it."""

import json
from array import array
from contextlib import asynccontextmanager

import pytest

from engine_adapter import EngineGarbled, Role, make_adapter
from engine_adapter.vllm.kv_transfer import KvTransfer, NixlPull, findings_of_transfer, transfer_of
from tests.engine_adapter.builders import body
from tests.engines import engine_spec
from tests.fake_engines.vllm import running_vllm

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


@asynccontextmanager
async def connected(told, **fields):
    """An adapter of a server that says this, and what its connection told."""
    with running_vllm(kv_transfer_config=told) as server:
        adapter = make_adapter(engine_spec("vllm", server.url, **fields))
        try:
            yield adapter, await adapter.connect()
        finally:
            await adapter.aclose()


@pytest.mark.parametrize(
    ("told", "fields", "role", "moves"),
    [
        (NIXL | {"kv_role": "kv_producer"}, {}, Role.PREFILL, True),
        (NIXL | {"kv_role": "kv_consumer"}, {}, Role.DECODE, True),
        (NIXL | {"kv_role": "kv_both"}, {}, Role.BOTH, True),
        (NIXL | {"kv_role": None}, {}, Role.BOTH, True),
        (NIXL | {"kv_role": "kv_consumer"}, {"role": Role.PREFILL}, Role.PREFILL, True),
        ({}, {}, Role.BOTH, False),
        (None, {}, Role.BOTH, False),
        (None, {"role": Role.DECODE}, Role.DECODE, True),
        (None, {"kv_transfer": "nixl"}, Role.BOTH, True),
        ("VllmConfig(kv_transfer_config=None)", {"role": Role.DECODE}, Role.DECODE, True),
    ],
    ids=[
        *("prefill", "decode", "both", "no role", "the settings' role", "no connector"),
        *("it says nothing", "the settings alone", "the settings' connector", "as older servers say it"),
    ],
)
async def test_it_passes_kv_on_as_its_settings_or_else_it_itself_says(told, fields, role, moves):
    async with connected(told, **fields) as (adapter, info):
        assert info.role is role
        assert (adapter.transfer is not None) is moves
        assert adapter.findings() == ()


@pytest.mark.parametrize(
    ("fields", "meant"),
    [({"role": Role.DECODE}, "role=decode"), ({"kv_transfer": "nixl"}, "kv_transfer=nixl")],
)
async def test_a_server_that_passes_nothing_on_is_in_no_pair(fields, meant):
    async with connected({}, **fields) as (adapter, _):
        assert adapter.transfer is None
        (finding,) = adapter.findings()
        assert f"it has {meant} and no NixlConnector: it is in no pair" in finding.problem
        assert "--kv-transfer-config" in finding.remedy


def spec_of(role=Role.DECODE, **options):
    return engine_spec("vllm", "http://127.0.0.1:1", role=role, **options)


def told_of(**fields) -> KvTransfer:
    return KvTransfer(**(NIXL | fields))


class TestTransferOf:
    @pytest.mark.parametrize(
        ("own", "set_s", "usable_s"),
        [(None, 30.0, 25.0), (60, 30.0, 25.0), (10.5, 30.0, 5.5), (60, 90.0, 55.0)],
    )
    def test_the_shorter_lease_holds(self, own, set_s, usable_s):
        extra = {} if own is None else {"kv_lease_duration": own}
        told = told_of(kv_connector_extra_config=extra)
        assert transfer_of(spec_of(kv_lease_s=set_s), told).usable_s == usable_s
        assert transfer_of(spec_of(kv_lease_s=set_s), None).usable_s == set_s - 5

    def test_one_that_is_too_short_to_be_used(self):
        told = told_of(kv_connector_extra_config={"kv_lease_duration": 5})
        assert transfer_of(spec_of(), told) is None
        (finding,) = findings_of_transfer(spec_of(), told)
        assert "for 5 s: too short to be used" in finding.problem

    @pytest.mark.parametrize(
        ("connector", "role", "moves"),
        [
            ("NixlPullConnector", Role.BOTH, True),
            ("MultiConnector", Role.DECODE, True),  # one of several may be the right one
            ("MultiConnector", Role.BOTH, False),
            ("LMCacheMPConnector", Role.DECODE, False),
            ("NixlPushConnector", Role.DECODE, False),
            (None, Role.DECODE, False),
        ],
    )
    def test_some_connectors_pass_kv_on_as_kvpin_asks_for_it(self, connector, role, moves):
        assert (transfer_of(spec_of(role), told_of(kv_connector=connector)) is not None) is moves

    def test_an_lmcache_has_a_connector_of_its_own(self):
        spec = spec_of(lmcache="http://127.0.0.1:2")
        assert transfer_of(spec, None) is None
        assert list(findings_of_transfer(spec, KvTransfer())) == []


class TestFindings:
    def test_an_engine_that_fails_without_its_kv(self):
        told = told_of(kv_load_failure_policy="fail")
        (finding,) = findings_of_transfer(spec_of(), told)
        assert '"kv_load_failure_policy":"recompute"' in finding.remedy
        assert list(findings_of_transfer(spec_of(Role.PREFILL), told)) == [], "it fetches none"
        assert list(findings_of_transfer(spec_of(Role.BOTH), told)) == [finding]

    @pytest.mark.parametrize("connector", ["MoRIIOConnector", "MooncakeConnector", "NixlPushConnector"])
    def test_an_engine_that_moves_kv_otherwise(self, connector):
        (finding,) = findings_of_transfer(spec_of(Role.BOTH), told_of(kv_connector=connector))
        assert f"it has a {connector}, and kvpin moves KV by NixlConnector alone" in finding.problem
        assert '"kv_connector":"NixlConnector"' in finding.remedy


@pytest.mark.parametrize(
    ("extra", "blocks"),
    [({}, 1), ({"blocks_per_chunk": 4}, 4), ({"block_size": 96}, 3), ({"block_size": "96"}, 1)],
)
def test_a_server_says_how_many_blocks_it_offloads_together(extra, blocks):
    told = KvTransfer("OffloadingConnector", "kv_both", kv_connector_extra_config=extra)
    assert told.offloads
    assert told.blocks_per_chunk(32) == blocks
    assert KvTransfer("NixlConnector", kv_connector_extra_config=extra).blocks_per_chunk(32) == 1


@pytest.mark.parametrize("describes", [True, False])
async def test_chunks_that_events_do_not_describe_are_a_finding(describes):
    extra = {"blocks_per_chunk": 4, "self_describing_kv_events": describes}
    told = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    async with connected(told) as (adapter, _):
        found = [finding.remedy for finding in adapter.findings()]
        assert ["self_describing_kv_events" in remedy for remedy in found] == ([] if describes else [True])


CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
IDS = array("i", [5, 6, 7])
PULL = NixlPull(30.0)
ASKED = {"model": "m", "prompt": "hi", "max_tokens": 9, "stream": True}
KEPT = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "0b1c",
    "remote_request_id": "cmpl-7",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 2,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 40,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 16,
}


def body_of(**fields):
    return body(**ASKED | fields)


def answer_of(params, **usage) -> bytes:
    return json.dumps({"choices": [], "usage": usage or None, "kv_transfer_params": params}).encode()


SEVERAL_OR_WHOLE = [
    {"stream": False},
    {"stream": None},
    {"n": 2},
    {"best_of": 3},
    {"n": "2"},
    {"echo": True},
    {"use_beam_search": True},
]


@pytest.mark.parametrize(
    ("route", "fields", "takes"),
    [
        *((route, {}, True) for route in (CHAT, COMPLETIONS, RESPONSES)),
        (COMPLETIONS, {"kv_transfer_params": None}, True),
        (COMPLETIONS, {"n": 2}, True),
        ("/v1/embeddings", {}, False),
        # What is computed whole, or moved by its client.
        (COMPLETIONS, {"prompt_logprobs": 0}, False),
        (COMPLETIONS, {"echo": True, "logprobs": 0}, False),
        (COMPLETIONS, {"kv_transfer_params": {"do_remote_decode": True}}, False),
    ],
)
def test_which_requests_it_takes(route, fields, takes):
    assert PULL.takes(route, body_of(**fields)) is takes


class TestFetch:
    """Whether the decode engine pulls with the request itself, or with one before."""

    @pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
    @pytest.mark.parametrize("fields", [{}, {"n": 1}, {"echo": False}, {"n": None}])
    def test_a_stream_of_one_answer_pulls_itself(self, route, fields):
        assert PULL.fetch(route, body_of(**fields), IDS) is None

    @pytest.mark.parametrize("fields", SEVERAL_OR_WHOLE)
    def test_all_others_pull_before(self, fields):
        asked = body_of(cache_salt="s", priority=-1, tools=[{}], kv_transfer_params={}, **fields)
        route, pull = PULL.fetch(CHAT, asked, IDS)
        assert route == COMPLETIONS
        expected = {"model": "m", "cache_salt": "s", "priority": -1, "prompt": [5, 6, 7]}
        expected |= {"max_tokens": 1, "temperature": 0, "stream": False}
        assert json.loads(pull.raw) == expected
        first = json.loads(PULL.first_leg(pull).raw)
        assert first.pop("kv_transfer_params")["do_remote_decode"] is True
        assert first == expected | {"ignore_eos": True}


class TestFirstLeg:
    def test_asks_for_one_token_and_for_the_blocks(self):
        """No token ends it before its limit: vLLM keeps no KV for an answer that ended otherwise."""
        about_its_end = {"min_tokens": 4, "stop": ["x"], "stop_token_ids": [7], "ignore_eos": False}
        told = {"stream_options": {"include_usage": True}, "logprobs": 3, "return_token_ids": True}
        asked = body_of(**about_its_end, **told)
        sent = json.loads(PULL.first_leg(asked).raw)
        assert sent == {
            "model": "m",
            "prompt": "hi",
            "max_tokens": 1,
            "stream": False,
            "stop": ["x"],
            "ignore_eos": True,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
        }

    def test_the_newer_limit_of_a_chat_is_one_too(self):
        sent = json.loads(PULL.first_leg(body_of(max_completion_tokens=50, max_tokens=None)).raw)
        assert (sent["max_completion_tokens"], sent["max_tokens"]) == (1, 1)

    def test_generation_is_left_out_only_where_the_prompt_does_not_hang_on_it(self):
        fields = {"tools": [{"type": "function"}], "tool_choice": "required", "response_format": {}}
        text = json.loads(PULL.first_leg(body_of(**fields)).raw)
        assert fields.items() <= text.items()
        ids = {"kv_transfer_params": {"prompt_token_ids": [5, 6]}}
        sent = json.loads(PULL.first_leg(body_of(**fields, **ids)).raw)
        assert not fields.keys() & sent.keys()
        params = sent["kv_transfer_params"]
        assert (params["prompt_token_ids"], params["do_remote_decode"]) == ([5, 6], True)


def test_a_client_may_say_that_it_has_no_parameters():
    asked = body_of(kv_transfer_params=None)
    assert PULL.takes(COMPLETIONS, asked)
    assert json.loads(PULL.first_leg(asked).raw)["kv_transfer_params"]["do_remote_decode"] is True
    handover = PULL.handover(answer_of(KEPT), asked)
    assert json.loads(PULL.second_leg(asked, handover).raw)["kv_transfer_params"] == KEPT


class TestHandover:
    def test_passes_on_what_the_engine_says_as_it_is(self):
        kept = KEPT | {"a_new_field": {"x": [1.0, None]}}
        handover = PULL.handover(answer_of(kept, prompt_tokens_details={"cached_tokens": 32}), body_of())
        assert handover.cached_tokens == 32
        asked = body_of(kv_transfer_params={"prompt_token_ids": [5, 6]})
        sent = json.loads(PULL.second_leg(asked, handover).raw)
        assert sent == ASKED | {"kv_transfer_params": kept | {"prompt_token_ids": [5, 6]}}

    def test_the_reuse_may_stand_beside_the_blocks_alone(self):
        assert PULL.handover(answer_of(KEPT), body_of()).cached_tokens == 16
        silent = answer_of(KEPT | {"remote_prefill_cached_tokens": None})
        assert PULL.handover(silent, body_of()).cached_tokens is None

    @pytest.mark.parametrize(
        "params",
        [
            None,
            {},
            KEPT | {"do_remote_prefill": False},
            KEPT | {"remote_block_ids": None},
            KEPT | {"remote_block_ids": []},
            KEPT | {"remote_block_ids": [[], []]},
            KEPT | {"transfer_mode": "push"},
        ],
    )
    def test_an_engine_that_keeps_nothing_to_be_pulled(self, params):
        assert PULL.handover(answer_of(params), body_of()) is None

    def test_blocks_without_groups_and_no_mode_are_of_older_engines(self):
        old = {name: value for name, value in KEPT.items() if name != "transfer_mode"}
        assert PULL.handover(answer_of(old | {"remote_block_ids": [4, 5]}), body_of()) is not None

    @pytest.mark.parametrize(
        "answer", [b"", b"[]", b"{", b'{"kv_transfer_params":7}', answer_of({"remote_block_ids": 3})]
    )
    def test_an_answer_that_is_none(self, answer):
        with pytest.raises(EngineGarbled, match="its answer to a prefill cannot be read"):
            PULL.handover(answer, body_of())


async def test_beside_an_lmcache_there_is_no_other_connector(make):
    adapter = make("vllm", "http://127.0.0.1:1", role=Role.PREFILL, lmcache="http://127.0.0.1:2")
    assert adapter.transfer is None
    assert "leave out lmcache or role" in str(adapter.findings()[-1])
