"""Requests of several kinds on a real pair of SGLangs: texts of a single server, and exact predictions."""

from __future__ import annotations

from statistics import median

import pytest

from proxy.core.placement.pairs import TransferResult
from proxy.request.records import RequestRecord
from tests.live.answers import texts_of
from tests.live.server_world import MODEL
from tests.sglang_live.halves_world import real_halves

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]
REQUESTS = 20


def asked(number: int) -> tuple[str, dict]:
    """The route and body of a request. Each four begin with the same text."""
    first = " ".join(f"{number // 4}. Entry {at} of a log: all was well." for at in range(12))
    rest = " ".join(f"{number}. Line {at} of a log: all was well." for at in range(8))
    text = f"{first} {rest}"
    body = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    completion = body | {"prompt": text}
    chat = body | {"messages": [{"role": "user", "content": text}]}
    kinds = (
        ("/v1/completions", completion),
        ("/v1/completions", completion | {"stream": True, "logprobs": 2}),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat | {"stream": True}),
        ("/generate", {"text": text, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}),
    )
    return kinds[number % len(kinds)]


async def test_the_answers_are_those_of_a_single_server(tmp_path, tell):
    async with real_halves(tmp_path) as world:
        records = list[RequestRecord]()
        for number in range(REQUESTS):
            path, body = asked(number)
            answer = await world.client.post(f"{world.url}{path}", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            records.append(await world.done())
            alone = await world.client.post(f"{world.single}{path}", json=body, timeout=120)
            assert texts_of(answer) == texts_of(alone) != [""], number
        assert {each.transfer for each in records} == {TransferResult.MOVED}
        assert {(each.prefilled_by, each.engine) for each in records} == {("p", "d")}
        audit = world.engine("p").audit.view()
        reused = sum(each.reported_tokens or 0 for each in records)
        tell(
            f"{len(records)} requests, texts equal; {reused} prompt tokens reused",
            f"audit of the engine for prefills: {audit.exact} exact of {audit.checked}",
            f"first half: median {median(each.first_leg_s or 0.0 for each in records):.3f} s",
            f"then to the first byte: median {median(each.transfer_s or 0.0 for each in records):.3f} s",
        )
        assert audit.exact == audit.checked == REQUESTS
        assert reused > 1000
        await several_choices(world)
        await a_client_that_leaves(world)


async def several_choices(world) -> None:
    """Each is a request of its own: two in one room would never be answered."""
    body = {"model": MODEL, "prompt": "Two of them.", "n": 2, "max_tokens": 4, "temperature": 0}
    answer = await world.client.post(f"{world.url}/v1/completions", json=body, timeout=60)
    assert len(answer.json()["choices"]) == 2


async def a_client_that_leaves(world) -> None:
    """Both servers go on to serve."""
    path, body = asked(1000)
    async with world.client.stream(
        "POST", f"{world.url}{path}", json=body | {"max_tokens": 500, "stream": True}
    ):
        pass  # its answer has begun
    await world.done()
    answer = await world.client.post(f"{world.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200
