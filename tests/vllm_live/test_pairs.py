"""Requests of all kinds on pairs of real vLLMs: the texts of a single engine, exact predictions, and counters
that agree."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from statistics import median
from time import monotonic

import pytest
from msgspec.structs import replace

from engine_adapter import Tier
from proxy.core.placement.pairs import TransferResult
from proxy.request.records import RequestRecord
from tests.live.fake_world import until
from tests.live.server_world import MODEL
from tests.vllm_live.pair_world import BLOCKS, real_pairs

pytestmark = [pytest.mark.live, pytest.mark.timeout(3600)]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
# An engine that is this slow never computes a prompt itself.
SLOW = 1000.0


def asked(number: int) -> tuple[str, dict]:
    """The route and body of a request. Each four begin with the same text."""
    first = " ".join(f"{number // 4}. Entry {at} of a log: all was well." for at in range(16))
    rest = " ".join(f"{number}. Line {at} of a log: all was well." for at in range(16))
    text = f"{first} {rest}"
    body = {"model": MODEL, "max_tokens": 12, "temperature": 0}
    completion = body | {"prompt": text}
    chat = body | {"messages": [{"role": "user", "content": text}]}
    tools = {"tools": [TOOL], "tool_choice": "none"}
    one_of = {"structured_outputs": {"choice": ["all was well", "nothing was well"]}}
    response = {"model": MODEL, "input": text, "max_output_tokens": 12, "temperature": 0}
    kinds = (
        ("/v1/completions", completion | {"stream": True}),
        ("/v1/completions", completion | {"stream": True, "stop": ["zzz"]}),
        ("/v1/completions", completion | {"stream": True, "logprobs": 2}),
        ("/v1/completions", completion | {"echo": True}),
        ("/v1/completions", completion | {"n": 2, "temperature": 1, "top_k": 1}),
        ("/v1/chat/completions", chat | {"stream": True}),
        ("/v1/chat/completions", chat | tools | {"stream": True}),
        ("/v1/chat/completions", chat | tools),
        ("/v1/chat/completions", chat | one_of),
        ("/v1/responses", response),
    )
    return kinds[number % len(kinds)]


def texts_of(answer: str) -> list[str]:
    """The text of each choice, of a stream or a whole answer."""
    found: dict[int, str] = {}
    for event in _events(answer):
        for output in event.get("output", ()):
            found[len(found)] = "".join(part["text"] for part in output.get("content") or ())
        for choice in event.get("choices", ()):
            message = choice.get("delta") or choice.get("message") or choice
            text = message.get("text") or message.get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + text
    return [found[index] for index in sorted(found)]


def _events(answer: str) -> Iterator[dict]:
    if answer.startswith("{"):
        yield json.loads(answer)
        return
    for line in answer.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def is_moved(record: RequestRecord) -> bool:
    return record.transfer is TransferResult.MOVED


async def test_the_answers_are_those_of_a_single_engine(tmp_path, tell, request):
    requests, pairs = (request.config.getoption(name) for name in ("--requests", "--pairs"))
    async with real_pairs(tmp_path, pairs) as world:
        records, single = list[RequestRecord](), world.servers["p0"]
        for number in range(requests):
            path, body = asked(number)
            await world.pace(SLOW)  # what an engine measures of itself would undo it
            answer = await world.client.post(f"{world.url}{path}", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            records.append(await world.done())
            alone = await world.client.post(f"{single}{path}", json=body, timeout=120)
            assert texts_of(answer.text) == texts_of(alone.text) != [], number
        moved = [record for record in records if is_moved(record)]
        tell(*figures(records, await world.fetched_tokens()))
        assert len(moved) > 0.8 * requests, "on a machine this busy, an engine may miss a health check"
        expected = sum(record.placement.chosen.pulled_tokens for record in moved)
        assert await world.fetched_tokens() == pytest.approx(expected, rel=0.1)
        for name in world.named("p"):
            audit = world.engine(name).audit.view()
            assert audit.exact == audit.checked
        assert sum(world.engine(name).audit.view().checked for name in world.named("p")) >= len(moved)
        for name in world.named("d"):  # what it pulled first was evicted, and it said so
            await until(lambda name=name: world.pool.index.held(name, Tier.GPU) <= 2 * BLOCKS)
        last = next(number for number in reversed(range(requests)) if is_moved(records[number]))
        await its_engine_answers_again(world, last)


async def its_engine_answers_again(world, number: int) -> None:
    """An engine holds what it pulled."""
    path, body = asked(number)
    await world.pace(1.0)
    await world.client.post(f"{world.url}{path}", json=body, timeout=120)
    record = await world.done()
    assert (record.engine[0], record.prefilled_by) == ("d", None)
    assert record.reported_tokens == record.predicted_tokens > 0


async def test_engines_that_are_killed(tmp_path, tell):
    """The one that answers, in the middle of its answer; then the one that computes the prompt, while it
    does."""
    async with real_pairs(tmp_path, 1) as world:
        bodies = [asked(10 * number)[1] | {"max_tokens": 500} for number in range(7)]
        url, single = (f"{base}/v1/completions" for base in (world.url, world.servers["p0"]))
        alone = [texts_of((await world.client.post(single, json=body)).text) for body in bodies]

        async def ask(number: int, killed: str) -> str:
            text = ""
            async with world.client.stream("POST", url, json=bodies[number], timeout=120) as answer:
                async for part in answer.aiter_text():
                    if killed == "d0" and not text:
                        world.running[killed].kill()
                    text += part
            return text

        async def stage(number: int, killed: str = "") -> RequestRecord:
            # A prompt that the engine computes itself teaches a rate that is too good by the pace before.
            await world.pace(SLOW ** (1 + number))
            answer = asyncio.create_task(ask(number, killed))
            if killed == "p0":
                await until(lambda: world.engine("p0").leases)
                world.running[killed].kill()
            assert texts_of(await answer) == alone[number] != [], killed
            record = await world.done()
            tell(f"killed: {killed or 'none'}; {record.prefilled_by} → {record.attempts}, {record.transfer}")
            if killed:
                await world.restart(killed)
            return record

        record = await stage(0, "d0")
        assert (record.legs, record.interrupted) == ([("p0", TransferResult.MOVED)], 1)
        record = await stage(1, "p0")
        assert (is_moved(record), record.interrupted, record.attempts) == (False, 0, ["d0"])
        for number in range(2, 7):  # what the engine measured of itself may come just before a request
            if is_moved(await stage(number)):
                return
        pytest.fail("no pair after both engines were started again")


async def test_an_engine_without_a_role_reads_what_another_one_holds(tmp_path, tell):
    """The first engine is busy with other prompts, so that later turns would wait there; the second one
    computes slowly."""
    async with real_pairs(tmp_path, 2, "b") as world:
        own, records = world.placer.outlook, list[RequestRecord]()
        world.placer.outlook = lambda now, spare=0.0: replace(own(now, spare), turns=5.0, rest_s=100.0)
        for number in range(10):
            path, body = asked(number)
            answers = list[list[str]]()
            for _ in range(2):  # the first engine computes the prompt, then the second one reads it
                await world.pace(100 * SLOW, "b1")
                world.placer.books["b0"].worked.add(monotonic(), 1e6)
                answer = await world.client.post(f"{world.url}{path}", json=body, timeout=120)
                assert answer.status_code == 200, answer.text
                records.append(await world.done())
                answers.append(texts_of(answer.text))
            assert answers[0] == answers[1] != [], number
        moved = [record for record in records if is_moved(record)]
        tell(*figures(records, await world.fetched_tokens()))
        assert {(each.prefilled_by, each.engine) for each in moved} == {("b0", "b1")}
        assert len(moved) > 7, "on a machine this busy, an engine may miss a health check"
        expected = sum(record.placement.chosen.pulled_tokens for record in moved)
        assert await world.fetched_tokens() == pytest.approx(expected, rel=0.1)
        audit = world.engine("b0").audit.view()
        assert audit.exact == audit.checked >= len(moved)
        for record in moved:  # what was read was found in the first engine's cache
            assert record.predicted_tokens > 0.8 * record.n_tokens


def figures(records: list[RequestRecord], fetched: float) -> Iterator[str]:
    moved = [record for record in records if is_moved(record)]
    prompts = sum(record.n_tokens for record in records)
    results = Counter("alone" if each.transfer is None else each.transfer.value for each in records)
    yield f"{len(records)} requests, texts equal: {dict(results)}"
    yield f"{sum(len(each.attempts) > 1 for each in records)} with a second attempt"
    yield f"{fetched:.0f} of {prompts} prompt tokens were fetched"
    yield f"{sum(each.reported_tokens or 0 for each in moved)} were reused by the first engines"
    for name, legs in (
        ("first leg", [each.first_leg_s for each in moved]),
        ("transfer and first token of a stream", [each.transfer_s for each in moved if each.stream]),
        ("fetch before others", [each.transfer_s for each in moved if not each.stream]),
    ):
        yield f"{name}: median {median(legs):.3f} s, longest {max(legs):.3f} s"
