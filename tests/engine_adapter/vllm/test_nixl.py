"""What each leg is sent, and what the first one's answer says, as vLLM 0.32 has them."""

import json
from array import array

import pytest

from engine_adapter import EngineGarbled, JsonBody, Role, make_adapter
from engine_adapter.vllm.kv_transfer import NixlPull
from tests.engines import engine_spec

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
IDS = array("i", [5, 6, 7])
NIXL = NixlPull(30.0)
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


def body_of(**fields) -> JsonBody:
    return JsonBody(json.dumps(ASKED | fields).encode())


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


class TestTakes:
    @pytest.mark.parametrize("route", [CHAT, COMPLETIONS, RESPONSES])
    @pytest.mark.parametrize("fields", [{}, {"kv_transfer_params": None}, *SEVERAL_OR_WHOLE])
    def test_what_generates(self, route, fields):
        assert NIXL.takes(route, body_of(**fields))

    @pytest.mark.parametrize(
        "fields",
        [
            {"prompt_logprobs": 0},
            {"echo": True, "logprobs": 0},
            {"kv_transfer_params": {"do_remote_decode": True}},
        ],
    )
    def test_nothing_that_is_computed_whole_or_moved_by_its_client(self, fields):
        assert not NIXL.takes(COMPLETIONS, body_of(**fields))


class TestFetch:
    """Whether the decode engine pulls with the request itself, or with one before."""

    @pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
    @pytest.mark.parametrize("fields", [{}, {"n": 1}, {"echo": False}, {"n": None}])
    def test_a_stream_of_one_answer_pulls_itself(self, route, fields):
        assert NIXL.fetch(route, body_of(**fields), IDS) is None

    @pytest.mark.parametrize("fields", SEVERAL_OR_WHOLE)
    def test_all_others_pull_before(self, fields):
        asked = body_of(cache_salt="s", priority=-1, tools=[{}], kv_transfer_params={}, **fields)
        route, body = NIXL.fetch(CHAT, asked, IDS)
        assert route == COMPLETIONS
        expected = {"model": "m", "cache_salt": "s", "priority": -1, "prompt": [5, 6, 7]}
        expected |= {"max_tokens": 1, "temperature": 0, "stream": False}
        assert json.loads(body.raw) == expected
        first = json.loads(NIXL.first_leg(body).raw)
        assert first.pop("kv_transfer_params")["do_remote_decode"] is True
        assert first == expected | {"ignore_eos": True}


class TestFirstLeg:
    def test_no_token_ends_it_before_its_limit(self):
        """vLLM keeps no KV for an answer that ended otherwise."""
        sent = json.loads(NIXL.first_leg(body_of(stop_token_ids=[7], ignore_eos=False)).raw)
        assert sent["ignore_eos"] is True
        assert "stop_token_ids" not in sent

    def test_asks_for_one_token_and_for_the_blocks(self):
        body = body_of(
            stream_options={"include_usage": True},
            min_tokens=4,
            logprobs=3,
            stop=["x"],
            return_token_ids=True,
        )
        sent = json.loads(NIXL.first_leg(body).raw)
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
        sent = json.loads(NIXL.first_leg(body_of(max_completion_tokens=50, max_tokens=None)).raw)
        assert (sent["max_completion_tokens"], sent["max_tokens"]) == (1, 1)

    def test_generation_is_left_out_only_where_the_prompt_does_not_hang_on_it(self):
        fields = {
            "tools": [{"type": "function"}],
            "tool_choice": "required",
            "response_format": {"type": "x"},
        }
        text = json.loads(NIXL.first_leg(body_of(**fields)).raw)
        assert fields.items() <= text.items()
        ids = {"kv_transfer_params": {"prompt_token_ids": [5, 6]}}
        assert not fields.keys() & json.loads(NIXL.first_leg(body_of(**fields, **ids)).raw).keys()

    def test_keeps_the_token_ids_that_kvpin_sends(self):
        body = body_of(kv_transfer_params={"prompt_token_ids": [5, 6]})
        first = json.loads(NIXL.first_leg(body).raw)["kv_transfer_params"]
        assert (first["prompt_token_ids"], first["do_remote_decode"]) == ([5, 6], True)


class TestHandover:
    def test_passes_on_what_the_engine_says_as_it_is(self):
        kept = KEPT | {"a_new_field": {"x": [1.0, None]}}
        handover = NIXL.handover(answer_of(kept, prompt_tokens_details={"cached_tokens": 32}), body_of())
        assert handover.cached_tokens == 32
        body = body_of(kv_transfer_params={"prompt_token_ids": [5, 6]})
        sent = json.loads(NIXL.second_leg(body, handover).raw)
        assert sent == ASKED | {"kv_transfer_params": kept | {"prompt_token_ids": [5, 6]}}

    def test_the_reuse_may_stand_beside_the_blocks_alone(self):
        assert NIXL.handover(answer_of(KEPT), body_of()).cached_tokens == 16
        assert (
            NIXL.handover(answer_of(KEPT | {"remote_prefill_cached_tokens": None}), body_of()).cached_tokens
            is None
        )

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
        assert NIXL.handover(answer_of(params), body_of()) is None

    def test_blocks_without_groups_and_no_mode_are_of_older_engines(self):
        old = {name: value for name, value in KEPT.items() if name != "transfer_mode"}
        assert NIXL.handover(answer_of(old | {"remote_block_ids": [4, 5]}), body_of()) is not None

    @pytest.mark.parametrize(
        "answer", [b"", b"[]", b"{", b'{"kv_transfer_params":7}', answer_of({"remote_block_ids": 3})]
    )
    def test_an_answer_that_is_none(self, answer):
        with pytest.raises(EngineGarbled, match="its answer to a prefill cannot be read"):
            NIXL.handover(answer, body_of())


async def test_beside_an_lmcache_there_is_no_other_connector():
    adapter = make_adapter(
        engine_spec("vllm", "http://127.0.0.1:1", role=Role.PREFILL, lmcache="http://127.0.0.1:2")
    )
    assert adapter.transfer is None
    assert "leave out lmcache or role" in str(adapter.findings()[-1])
    await adapter.aclose()
