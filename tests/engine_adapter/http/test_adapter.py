"""What all adapters have in common; tests/contract tests the rest of each."""

import pytest

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineUnavailable
from engine_adapter.http.adapter import HttpAdapter
from engine_adapter.registry import make_adapter
from engine_adapter.types import EngineSpec
from tests.engines import engine_spec


async def test_requests_go_to_the_engine_until_it_is_removed():
    adapter = HttpAdapter(EngineSpec("openai_compatible", "http://127.0.0.1:1/v1", "e", api_key="k"))
    request = adapter.prepare("POST", "/v1/completions", {"authorization": "Bearer c"}, JsonBody(b"{}"))
    assert (request.url, request.body) == ("http://127.0.0.1:1/v1/completions", b"{}")
    assert (b"authorization", b"Bearer k") in request.headers
    await adapter.aclose()
    with pytest.raises(EngineUnavailable, match="removed"):
        await adapter._control.get("/v1/models")


def test_a_rank_is_named_in_place_of_the_clients_own_word():
    theirs = {"X-Data-Parallel-Rank": "0"}
    sent = [
        make_adapter(engine_spec("sglang", "http://127.0.0.1:1", **rank)).prepare("POST", "/", theirs, None)
        for rank in ({"dp_rank": 1}, {})
    ]
    named = [[value for name, value in each.headers if b"rank" in name] for each in sent]
    assert named == [[b"1"], [b"0"]]
