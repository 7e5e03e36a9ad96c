"""What one vLLM says of a prompt that it keeps for another one, and what that one does with it.

Fakes, or real ones with NIXL."""

from __future__ import annotations

import json
import random
import uuid

import pytest

from engine_adapter import JsonBody
from engine_adapter.http.control import ControlClient
from engine_adapter.vllm.discovery import look
from engine_adapter.vllm.kv_transfer import NixlPull
from tests.contract.follower import following
from tests.engines import engine_spec

BLOCK = 32
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NIXL = NixlPull(30.0)


def tokens_of(count: int) -> list[int]:
    return [random.randrange(100, 4000) for _ in range(count)]  # noqa: S311 - no secret


class Pair:
    def __init__(self, urls: tuple[str, str]) -> None:
        self.prefill, self.decode = (ControlClient(engine_spec("vllm", url, "under-test")) for url in urls)

    async def aclose(self) -> None:
        await self.prefill.aclose()
        await self.decode.aclose()

    async def first_leg(self, body: dict, path: str = COMPLETIONS) -> dict:
        sent = NIXL.first_leg(JsonBody(json.dumps(body).encode()))
        return await self.prefill.call("POST", path, json=json.loads(sent.raw))

    async def second_leg(self, body: dict, first: dict, path: str = COMPLETIONS, **params: object) -> dict:
        """The decode engine's answer; `params` take the place of what the prefill engine said."""
        handover = NIXL.handover(json.dumps(first).encode(), JsonBody(b"{}"))
        assert handover is not None
        sent = json.loads(NIXL.second_leg(JsonBody(json.dumps(body).encode()), handover).raw)
        sent["kv_transfer_params"] |= params
        return await self.decode.call("POST", path, json=sent)

    async def fetched(self) -> int:
        """Prompt tokens whose KV the decode engine fetched so far."""
        return (await look(self.decode, None)).fetched


@pytest.fixture
async def pair(vllm_pair):
    pair = Pair(vllm_pair)
    yield pair
    await pair.aclose()


def asked(tokens: list[int], **fields: object) -> dict:
    return {"prompt": tokens, "max_tokens": 6, "temperature": 0} | fields


def cached_of(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def text_of(answer: dict) -> str:
    return answer["choices"][0]["text"]


class TestFirstLeg:
    @pytest.mark.parametrize("count", [10, 64, 65, 200])
    async def test_it_answers_one_token_and_says_what_it_keeps(self, pair, count):
        answer = await pair.first_leg(asked(tokens_of(count)))
        assert answer["usage"]["completion_tokens"] == 1
        assert answer["choices"][0]["finish_reason"] == "length"
        kept = answer["kv_transfer_params"]
        (blocks,) = kept.pop("remote_block_ids")  # one KV cache group
        assert len(blocks) == len(set(blocks)) == -(-count // BLOCK)
        assert all(type(block) is int and block > 0 for block in blocks)
        assert uuid.UUID(kept.pop("remote_engine_id"))
        assert kept.pop("remote_request_id").startswith("cmpl-")
        assert (type(kept.pop("remote_host")), type(kept.pop("remote_port"))) == (str, int)
        assert kept == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            **dict.fromkeys(("tp_size", "dcp_size", "pp_size"), 1),
            "remote_num_tokens": count,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }

    async def test_what_it_reused_stands_in_its_usage_and_beside_the_blocks(self, pair):
        tokens = tokens_of(100)
        await pair.first_leg(asked(tokens))
        again = await pair.first_leg(asked(tokens))
        assert cached_of(again) == again["kv_transfer_params"]["remote_prefill_cached_tokens"] == 96

    async def test_who_is_not_asked_keeps_nothing(self, pair):
        answer = await pair.prefill.call("POST", COMPLETIONS, json=asked(tokens_of(50)))
        assert NIXL.handover(json.dumps(answer).encode(), JsonBody(b"{}")) is None


class TestSecondLeg:
    async def test_it_answers_as_the_first_engine_would_and_reports_no_reuse(self, pair):
        tokens, before = tokens_of(200), await pair.fetched()
        answer = await pair.second_leg(asked(tokens), await pair.first_leg(asked(tokens)))
        assert cached_of(answer) == 0
        assert await pair.fetched() - before == 200
        alone = await pair.prefill.call("POST", COMPLETIONS, json=asked(tokens))
        assert text_of(answer) == text_of(alone)
        assert cached_of(alone) == 192, "the prefill engine still has it"

    async def test_the_next_request_finds_what_was_fetched(self, pair):
        tokens, before = tokens_of(200), await pair.fetched()
        one = asked(tokens, max_tokens=1)
        await pair.second_leg(one, await pair.first_leg(one))
        again = await pair.decode.call("POST", COMPLETIONS, json=asked(tokens))
        assert cached_of(again) == 192
        assert await pair.fetched() - before == 200

    async def test_only_what_it_lacks_is_fetched(self, pair):
        tokens, before = tokens_of(200), await pair.fetched()
        await pair.decode.call("POST", COMPLETIONS, json=asked(tokens[:100]))
        answer = await pair.second_leg(asked(tokens), await pair.first_leg(asked(tokens)))
        assert cached_of(answer) == 0, "neither what it fetched nor what it held"
        assert await pair.fetched() - before == 104

    async def test_what_was_fetched_is_announced_as_what_was_computed(self, pair, vllm_pair, adapter_of):
        tokens = tokens_of(200)
        async with following(adapter_of("vllm", vllm_pair[1])) as follower:
            assert follower.held(tokens) == 0
            await pair.second_leg(asked(tokens), await pair.first_leg(asked(tokens)))
            await follower.until(lambda: follower.held(tokens) == 192)

    async def test_a_chat_of_token_ids_takes_both_kinds_of_parameters(self, pair):
        tokens, before = tokens_of(100), await pair.fetched()
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "temperature": 0}
        chat |= {"kv_transfer_params": {"prompt_token_ids": tokens}}
        first = await pair.first_leg(chat, CHAT)
        assert first["kv_transfer_params"]["remote_num_tokens"] == 100
        answer = await pair.second_leg(chat, first, CHAT)
        assert await pair.fetched() - before == 100
        alone = await pair.prefill.call("POST", CHAT, json=chat)
        assert answer["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]

    async def test_the_kv_of_an_engine_that_is_gone_is_computed(self, pair):
        tokens, before = tokens_of(100), await pair.fetched()
        first = await pair.first_leg(asked(tokens))
        gone = {"remote_engine_id": str(uuid.uuid4()), "remote_port": 1}
        answer = await pair.second_leg(asked(tokens), first, **gone)
        assert (cached_of(answer), await pair.fetched() - before) == (0, 0)
        assert text_of(answer) == text_of(await pair.prefill.call("POST", COMPLETIONS, json=asked(tokens)))
