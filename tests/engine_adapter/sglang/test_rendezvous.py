"""Where two halves of a request meet. Real pairs: tests/sglang_live/test_halves.py."""

import pytest

from engine_adapter import EngineRejected, JsonBody
from engine_adapter.sglang.requests import check_is_one, rendezvous_of
from tests.engine_adapter.sglang.test_findings import server
from tests.engines import engine_spec

HALF = {
    "kv_events": None,
    "disaggregation_mode": "prefill",
    "disaggregation_bootstrap_port": 8998,
    "disaggregation_transfer_backend": "nixl",
}


def rendezvous(url="http://gpu-1:30000", rank=None, **fields):
    options = {} if rank is None else {"dp_rank": rank}
    return rendezvous_of(server(**HALF | fields), engine_spec("sglang", url, **options))


class TestMeet:
    def test_in_a_room_at_the_prefill_server(self):
        met = rendezvous("http://[::1]:30000").meet()
        assert (met["bootstrap_host"], met["bootstrap_port"]) == ("::1", 8998)
        assert 0 < met["bootstrap_room"] < 2**63

    def test_each_time_in_another_one(self):
        one = rendezvous()
        assert len({one.meet()["bootstrap_room"] for _ in range(100)}) == 100

    @pytest.mark.parametrize("rank", range(3))
    def test_the_room_leads_to_the_rank(self, rank):
        one = rendezvous(rank=rank, dp_size=3)
        assert {one.meet()["bootstrap_room"] % 3 for _ in range(20)} == {rank}

    def test_only_servers_with_the_same_way_to_move_kv(self):
        assert rendezvous().name == rendezvous(disaggregation_mode="decode").name
        assert rendezvous().name != rendezvous(disaggregation_transfer_backend="mooncake").name

    def test_a_whole_server_meets_nobody(self):
        assert rendezvous(disaggregation_mode="null") is None

    def test_only_for_answers(self):
        assert rendezvous().takes("/v1/completions")
        assert not rendezvous().takes("/tokenize")


class TestOne:
    @pytest.mark.parametrize(
        "body",
        [
            b'{"text": "a", "sampling_params": {"n": 1}}',
            b'{"input_ids": [1, 2]}',
            b'{"text": "a", "sampling_params": null}',
        ],
    )
    def test_one_answer_to_one_prompt(self, body):
        check_is_one(server(**HALF), "/generate", JsonBody(body))

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            (b'{"text": ["a"]}', "text"),
            (b'{"input_ids": [[1], [2]]}', "input_ids"),
            (b'{"text": "a", "sampling_params": {"n": 2}}', "sampling_params"),
            (b'{"text": "a", "sampling_params": [{}]}', "sampling_params"),
        ],
    )
    def test_no_more(self, body, field):
        with pytest.raises(EngineRejected, match=f"{field} asks for several answers") as caught:
            check_is_one(server(**HALF), "/generate", JsonBody(body))
        assert (caught.value.status, caught.value.param) == (400, field)
        check_is_one(server(**HALF | {"disaggregation_mode": "null"}), "/generate", JsonBody(body))
