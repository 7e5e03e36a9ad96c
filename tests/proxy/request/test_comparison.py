import json
import time
from array import array
from dataclasses import dataclass, field

import pytest

from engine_adapter import EngineInfo, Tier
from engine_adapter.types import Attention, KvGroup
from proxy.core.index.blocks import chain, namespace_root
from proxy.core.misses import Miss, detail_of
from proxy.core.placement.decision import Cost, Placement
from proxy.core.placement.placer import Placer
from proxy.prompt import Prompt
from proxy.request.comparison import Comparison, Flush, repeated_tokens
from proxy.request.records import RequestRecord, RequestRecords
from tests.placements import placement_of


@dataclass
class FakeEngine:
    info: EngineInfo | None = None
    emptied: list[float] = field(default_factory=list)
    flushed: list[Flush] = field(default_factory=list)


def tokens(n, start=0):
    return [start + i for i in range(n)]


class World:
    """A log of requests and engines `a` and `b`, with blocks of 16 tokens."""

    def __init__(self):
        self.log = RequestRecords(100)
        self.engines = {"a": FakeEngine(), "b": FakeEngine()}
        self.comparison = Comparison(self.log, self.engines, 16)
        self.now = time.time()

    def record(self, name, ids, *, body=None, extra_ids=None, salt=None, lora=None, cached=(0,), **fields):
        """A finished request; the engines hold `cached` of its tokens, and `a` is chosen."""
        prompt = Prompt(array("i", ids), extra_ids, salt, lora) if ids is not None else None
        costs = tuple(Cost(engine, cached_tokens=n) for engine, n in zip("ab", cached, strict=False))
        self.now += 10
        given = {"model": "m", "tenant": None, "started": self.now, "duration_s": 1.0, "reported_tokens": 0}
        given["placement"] = placement_of("a", cached[0], len(ids or ()), costs, "lowest cost")
        given["route"] = "/v1/x"
        record = RequestRecord(name, stream=False, prompt=prompt, **(given | fields))
        if body is not None:
            self.log.keep_source(record, json.dumps(body).encode())
        self.log.add(record)
        return record

    async def miss(self, *args, **fields):
        """Why a new request missed, and the sentence about it."""
        found = await self.comparison.explain(self.record(*args, **fields))
        return found.miss, detail_of(found)

    async def nearest(self, record):
        record.diagnosis = None
        like = (await self.comparison.explain(record)).compared
        return self.log.get(like.request_id) if like is not None else None


@pytest.fixture
def world():
    return World()


class TestNearest:
    async def test_is_the_earlier_prompt_it_shares_most_with(self, world):
        near = world.record("near", tokens(40))
        world.record("far", tokens(20))
        new = world.record("new", [*tokens(35), 7])
        world.record("later", tokens(36), started=new.started + 1)
        assert await world.nearest(new) is near

    async def test_of_equals_is_the_newest_of_the_same_api(self, world):
        said = {"messages": [{"role": "user", "content": "What time is it?"}]}
        world.record("earlier", tokens(20), body=said)
        same = world.record("same", tokens(20), body=said)
        world.record("other", tokens(20), body={"input": "What time is it?"}, route="/v1/y")
        assert await world.nearest(world.record("new", tokens(20))) is same
        alike = world.record("alike", tokens(20, 50), body={**said, "tools": []})
        assert await world.nearest(alike) is same
        longer = world.record("longer", tokens(24), route="/v1/y")
        assert await world.nearest(world.record("newer", tokens(24))) is longer

    async def test_is_the_one_it_continues_if_none_shares_a_block(self, world):
        body = {"instructions": "Be brief.", "input": "Who wrote it?"}
        first = world.record("first", tokens(64), body=body, answer_id="resp_1")
        world.record("between", tokens(64, 200), body={"input": "And when?"}, answer_id="resp_2")
        body = {"input": "And when?", "previous_response_id": "resp_1"}
        new = world.record("new", tokens(64, 100), body=body)
        assert await world.nearest(new) is first
        assert (await world.comparison.explain(new)).miss is Miss.SYSTEM

    @pytest.mark.parametrize(
        "fields", [{"salt": "s"}, {"tenant": "red"}, {"ids": None}, {"error": "no"}, {"model": "n"}]
    )
    async def test_what_shares_no_cache_is_not_compared(self, world, fields):
        world.record("other", **({"ids": tokens(40)} | fields))
        assert await world.nearest(world.record("new", tokens(40))) is None

    async def test_is_one_with_a_text_alike_if_none_shares_a_block(self, world):
        said = "is the time. You are a kind and helpful assistant."
        world.record("unlike", tokens(40, 100), body={"prompt": "Write a poem about the sea."})
        world.record("bodiless", tokens(40, 200))
        alike = world.record("alike", tokens(40, 300), body={"prompt": f"10:31 {said}"})
        new = world.record("new", tokens(40), body={"prompt": f"10:32 {said}"})
        assert await world.nearest(new) is alike
        diagnosis = await world.comparison.explain(new)
        assert (diagnosis.miss, str(diagnosis.at)) == (Miss.INPUT, "prompt, character 4")
        assert await world.nearest(world.record("lone", tokens(40, 400), body={"prompt": "x"})) is None

    async def test_a_date_at_the_beginning_is_told_though_another_prompt_has_the_same(self, world):
        document = "The river bends twice before it meets the sea. " * 20
        dated, again = [*range(1000, 1020), *tokens(400)], [*range(2000, 2020), *tokens(400)]
        before = world.record("before", dated, body={"prompt": f"May 1. {document}"})
        poem = [*range(2000, 2020), *tokens(400, 500)]
        world.record("other", poem, body={"prompt": "May 2. Write a poem."})
        new = world.record("new", again, body={"prompt": f"May 2. {document}"})
        assert await world.nearest(new) is before
        assert (await world.comparison.explain(new)).miss is Miss.INPUT

    async def test_is_one_with_the_same_tools_if_several_are_alike(self, world):
        said = {"prompt": "10:31 is the time. You are a kind and helpful assistant."}
        bare = world.record("bare", tokens(40, 100), body=said)
        world.record("tools", tokens(40, 200), body={**said, "tools": [{"type": "function"}]})
        assert await world.nearest(world.record("new", tokens(40), body=said)) is bare

    async def test_other_images_part_prompts_of_the_same_tokens(self, world):
        def with_image(name, identity):
            marks = [0] * 48
            marks[20] = identity
            return world.record(name, tokens(48), extra_ids=array("Q", marks) if identity else None)

        cat, _ = with_image("cat", 1), with_image("text", 0)
        assert await world.nearest(with_image("again", 1)) is cat
        dog = await world.comparison.explain(with_image("dog", 2))
        assert dog.compared.common_tokens == 20


class TestWhyItMissed:
    async def test_is_told_once(self, world):
        world.record("r1", tokens(64))
        new = world.record("r2", tokens(64))
        first = await world.comparison.explain(new)
        assert first.miss is Miss.EVICTED
        world.engines["a"].emptied.append(new.started - 5)
        assert await world.comparison.explain(new) is first

    @pytest.mark.parametrize(
        ("before", "now", "emptied", "miss"),
        [
            ({}, {}, (), Miss.EVICTED),
            ({}, {}, (-3.0, 5.0), Miss.RESTARTED),
            ({}, {"cached": (48,)}, (14.0,), Miss.RESTARTED),  # kvpin noticed it late
            ({}, {"cached": (0, 48)}, (), Miss.ELSEWHERE),
            ({"duration_s": 60.0}, {}, (), Miss.RUNNING),
            # It was answered while its engine was still busy with it.
            ({"duration_s": 60.0, "answered_s": 1.0}, {}, (), Miss.EVICTED),
            ({}, {"tokens_agree": False}, (), Miss.UNKNOWN),  # the engine made other tokens
            ({"lora": "ada"}, {}, (), Miss.LORA),
            ({"served_as": "n"}, {}, (), Miss.MODEL),
            # Another question about the same document is no miss.
            (
                {"ids": tokens(200)}, {"ids": [*tokens(180), *tokens(20, 900)], "reported_tokens": 176}, (),
                Miss.SHARED,
            ),
        ],
    )  # fmt: skip
    async def test_beside_an_earlier_request(self, world, before, now, emptied, miss):
        """`emptied`: when the engine lost its cache, in seconds after the earlier request came."""
        asked = {"ids": tokens(64), "body": {"messages": [{"role": "user", "content": "Who wrote it?"}]}}
        first = world.record("r1", **asked | before)
        world.engines["a"].emptied += [first.started + after for after in emptied]
        assert (await world.miss("r2", **asked | now))[0] is miss

    @pytest.mark.parametrize(
        ("after", "prefix", "salts", "miss"),
        [
            (5, None, {None}, Miss.FLUSHED),
            (5, None, {"s", "t"}, Miss.FLUSHED),
            (5, None, {"t"}, Miss.EVICTED),
            (5, Prompt(array("i", tokens(20)), salt="s"), {"s"}, Miss.FLUSHED),
            (5, Prompt(array("i", tokens(15)), salt="s"), {"s"}, Miss.EVICTED),  # not a block
            (5, Prompt(array("i", tokens(20)), salt="s", lora="ada"), {"s"}, Miss.EVICTED),
            (-3, None, {None}, Miss.EVICTED),
            (14, None, {None}, Miss.EVICTED),
        ],
    )
    async def test_a_flush_is_the_cause_of_what_it_concerns(self, world, after, prefix, salts, miss):
        """`after`: when it was ordered, in seconds after the earlier request came."""
        first = world.record("r1", tokens(64), salt="s")
        world.engines["a"].flushed += [Flush(first.started + after, prefix, frozenset(salts))]
        assert (await world.miss("r2", tokens(64), salt="s"))[0] is miss

    @staticmethod
    def in_halves(cached, prefiller="a"):
        """A placement where `a` or `b` computes the prompt, and `d` answers."""
        costs = [Cost("d", cached_tokens=n, prefiller=name) for name, n in zip("ab", cached, strict=True)]
        (chosen,) = [cost for cost in costs if cost.prefiller == prefiller]
        return Placement(chosen, chosen.cached_tokens, 64, lambda: tuple(costs), "lowest cost")

    async def test_of_halves_the_engine_that_computed_it_is_named(self, world):
        first = world.record("r1", tokens(64), placement=self.in_halves((0, 0)))
        miss, told = await world.miss("r2", tokens(64), placement=self.in_halves((48, 0)))
        assert (miss, "but a evicted or flushed them" in told) == (Miss.EVICTED, True)
        miss, told = await world.miss("r3", tokens(64), placement=self.in_halves((48, 0), "b"))
        assert (miss, told.startswith("a holds 48 tokens of it")) == (Miss.ELSEWHERE, True)
        world.engines["a"].emptied.append(first.started + 5)
        later = {"placement": self.in_halves((0, 0)), "started": first.started + 9}
        miss, told = await world.miss("r4", tokens(64), **later)
        assert (miss, "but a was restarted or flushed" in told) == (Miss.RESTARTED, True)

    async def test_an_engine_that_got_its_kv_is_named_if_it_lost_that(self, world):
        world.record("r1", tokens(64), placement=self.in_halves((0, 0)))
        alone = placement_of("d", 48, 64, (Cost("d", cached_tokens=48),), "lowest cost")
        miss, told = await world.miss("r2", tokens(64), placement=alone)
        assert (miss, "but d evicted or flushed them" in told) == (Miss.EVICTED, True)

    async def test_its_engine_is_gone(self, world):
        world.record("r1", tokens(64))
        del world.engines["a"]
        assert (await world.miss("r2", tokens(64)))[0] is Miss.EVICTED
        away = placement_of("z", 0, 64, (Cost("z"),), "lowest cost")
        world.record("r3", tokens(64, 100), placement=away)
        assert (await world.miss("r4", tokens(64, 100)))[0] is Miss.AWAY

    async def test_it_differs_from_a_request_of_another_api(self, world):
        chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]}
        world.record("r1", tokens(64), body=chat)
        new = {"body": {"instructions": "Be brief.", "input": "two"}, "reported_tokens": 32, "route": "/v1/y"}
        found = await world.miss("r2", [*tokens(40), 5, *tokens(24, 40)], **new)
        assert found == (Miss.INPUT, "it differs from request r1 from token 40 on")

    @pytest.mark.parametrize(
        ("continued", "miss"), [("resp_1", Miss.TEMPLATE), ("resp_2", Miss.INPUT), (None, Miss.INPUT)]
    )
    async def test_a_response_goes_on_only_after_the_one_it_names(self, world, continued, miss):
        world.record("r1", tokens(64), body={"input": "Who wrote it?"}, answer_id="resp_1")
        body = {"input": "And when?", "previous_response_id": continued}
        new = world.record("r2", [*tokens(40), 5, *tokens(40, 40)], body=body, reported_tokens=32)
        diagnosis = await world.comparison.explain(new)
        assert diagnosis.miss is miss
        assert (diagnosis.at is not None) is (continued is None)

    @pytest.mark.parametrize(
        ("own", "repeated"),
        [
            ([*tokens(20), *tokens(80, 900)], 0),
            ([*tokens(20), *tokens(40, 900), *tokens(80, 20)], 80),
            (tokens(20), 0),
            ([*tokens(20), *tokens(9, 30)], 0),  # shorter than a sample
            ([*tokens(20), *([1 << 8] * 40)], 0),  # bytes that are found between two tokens
        ],
    )
    def test_how_many_tokens_are_repeated_behind_a_difference(self, own, repeated):
        other = [*tokens(20), *([1] * 40)] if own[-1] == 1 << 8 else tokens(100)
        found = repeated_tokens(Prompt(array("i", own)), Prompt(array("i", other)), 20)
        assert found == pytest.approx(repeated, abs=20)
        assert (found == 0) is (repeated == 0)

    async def test_of_an_image_whose_tokens_are_not_known(self, world):
        def asked(name, data):
            part = {"type": "image_url", "image_url": {"url": data}}
            body = {"messages": [{"role": "user", "content": [part]}]}
            record = world.record(name, tokens(20), body=body, reported_tokens=16)
            record.prompt = Prompt(array("i", tokens(20)), whole=False)
            return record

        asked("r1", "data:1")
        diagnosis = await world.comparison.explain(asked("r2", "data:2"))
        assert (diagnosis.miss, str(diagnosis.at)) == (Miss.MEDIA, "messages[0].content[0]")


@pytest.mark.parametrize("has_earlier", [True, False])
@pytest.mark.parametrize(
    ("group", "cut", "miss"),
    [
        (KvGroup(1, Attention.WINDOW, 64), 160, Miss.WINDOW),
        (KvGroup(1, Attention.CHUNK, 64), 32, Miss.WINDOW),  # a boundary between chunks needs nothing
        (KvGroup(1, Attention.STATE), 160, Miss.STATE),
    ],
)
async def test_the_attention_that_cut_a_prefix_names_the_miss(world, group, cut, miss, has_earlier):
    placer = Placer(16)
    placer.add("a", gpu_blocks=100)
    prompt = chain(namespace_root("m"), array("i", tokens(200)), None, 16)
    placer.index.store("a", Tier.GPU, prompt.hashes[:10])
    placer.index.add_group("a", group, 16, 16)
    candidate = placer.candidate(0.0, "a", placer.match(prompt)["a"])
    if has_earlier:
        world.record("r1", tokens(200))
    placement = placer.place(0.0, [candidate], prompt)
    new = world.record("r2", tokens(200), placement=placement, reported_tokens=160 - cut)
    diagnosis = await world.comparison.explain(new)
    assert placement.predicted_tokens == 160 - cut
    assert diagnosis.miss is miss
    assert f"{cut} more tokens" in detail_of(diagnosis)
