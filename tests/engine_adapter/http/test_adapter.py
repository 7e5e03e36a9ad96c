"""What all adapters have in common; tests/contract tests the rest of each."""

import pytest

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineSpecError, EngineUnavailable
from engine_adapter.http.adapter import HttpAdapter
from engine_adapter.types import EngineSpec


async def test_requests_go_to_the_engine_until_it_is_removed():
    adapter = HttpAdapter(EngineSpec("openai_compatible", "http://127.0.0.1:1/v1", "e", api_key="k"))
    request = adapter.prepare("POST", "/v1/completions", {"authorization": "Bearer c"}, JsonBody(b"{}"))
    assert (request.url, request.body) == ("http://127.0.0.1:1/v1/completions", b"{}")
    assert (b"authorization", b"Bearer k") in request.headers
    await adapter.aclose()
    with pytest.raises(EngineUnavailable, match="removed"):
        await adapter._control.get("/v1/models")


def test_a_wrong_description_is_refused():
    with pytest.raises(EngineSpecError, match="is not an http"):
        HttpAdapter(EngineSpec("openai_compatible", "h:1", "e"))
