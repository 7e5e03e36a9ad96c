"""Which requests are several, and the bodies of their parts."""

import json
from typing import ClassVar

import pytest

from engine_adapter import JsonBody
from proxy.api.fan_out.split import CHAT, COMPLETIONS, MAX_PARTS, prompts_of, several_of
from proxy.errors import BadRequest
from proxy.fleet.fleet import Fleet
from tests.fakes import add_ready

NEVER = {"runs_several": False}
APART = {**NEVER, "recomputes_prompts": True}


def fleet_of(*infos):
    fleet = Fleet()
    for number, info in enumerate(infos):
        add_ready(fleet, f"e{number}", **info)
    return fleet


def split(route, fields, *infos, reuse=True, listed=False):
    body = fields if isinstance(fields, JsonBody) else JsonBody(json.dumps(fields).encode())
    prompts = prompts_of(body, listed=listed) if route == COMPLETIONS else None
    fleet, best = fleet_of(*infos or [NEVER]), route == COMPLETIONS and not listed
    return several_of(body, lambda: fleet.pools["m"], prompts, reuse=reuse, listed=listed, takes_best=best)


def bodies(several):
    return [json.loads(part.body.raw) for part in several.parts()]


def indices(several):
    return [(part.place.prompt, part.place.index) for part in several.parts()]


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (CHAT, {}), (CHAT, {"n": 1}), (CHAT, {"n": None, "n_cmpl": None}), (CHAT, {"best_of": 3}),
        (CHAT, {"prompt": ["a", "b"]}), (COMPLETIONS, {"prompt": "a", "n": 1, "best_of": 1}),
        *((COMPLETIONS, {"prompt": each}) for each in ("a", ["a"], [[1, 2]], [1, 2, 3], [], ["a", 5])),
    ],
)  # fmt: skip
def test_a_single_request_stays_as_it_is(route, fields):
    assert split(route, fields) is None


def test_a_route_that_answers_with_a_list():
    def listed(fields, **options):
        return split(COMPLETIONS, fields, APART, listed=True, **options)

    several = listed({"prompt": ["a", [1, 2], {"prompt_string": "c"}], "n_cmpl": 2, "seed": 5})
    assert several.listed
    assert indices(several) == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]
    assert bodies(several)[3] == {"prompt": [1, 2], "seed": 6}
    assert listed({"prompt": "a", "n": 2}).shares_prompt
    for prompt in ("a", ["a"], [1, 2], ["a", 5], [-1, "a"], []):
        assert listed({"prompt": prompt}) is None
    assert len(bodies(listed({"prompt": ["a", "b"]}, reuse=False))) == 2
    assert not listed({"prompt": "a", "n": 2}, reuse=False).shares_prompt


def test_of_a_plain_request_not_even_the_pool_is_looked_up():
    assert several_of(JsonBody(b'{"model":"m","messages":[],"prompt":"a"}'), None, reuse=True) is None


@pytest.mark.parametrize("name", ["n", "n_cmpl"])
def test_each_choice_becomes_a_request_with_a_seed_of_its_own(name):
    several = split(CHAT, {"messages": [], name: 3, "seed": 7})
    assert bodies(several) == [{"messages": [], "seed": seed} for seed in (7, 8, 9)]
    assert indices(several) == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("seed", [-1, None, "x"])
def test_a_seed_that_is_none_stays_as_it_is(seed):
    several = split(CHAT, {"n": 2, "seed": seed})
    assert bodies(several) == [{"seed": seed}] * 2


@pytest.mark.parametrize("prompts", [["a", "b"], [[1, 2], [3]], ["a", [1, 2]], [[1, 2], "a"]])
def test_choices_are_numbered_prompt_by_prompt(prompts):
    several = split(COMPLETIONS, {"prompt": prompts, "n": 2, "seed": 1})
    assert indices(several) == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert bodies(several) == [{"prompt": prompt, "seed": seed} for prompt in prompts for seed in (1, 2)]


def test_a_part_keeps_the_bytes_of_its_prompt():
    several = split(COMPLETIONS, JsonBody(b'{"prompt": [ "a\\u0062", "\\u00e4" ]}'), {})
    parts = [part.body.raw for part in several.parts()]
    assert parts == [b'{"prompt":"a\\u0062"}', b'{"prompt":"\\u00e4"}']


class TestEmbeddings:
    """They are prompts, too, and come before the others."""

    EMBEDS: ClassVar = {"renders_embeds": True}

    @pytest.mark.parametrize("info", [EMBEDS, {"renders_alike": True, **NEVER}])
    def test_each_is_a_part(self, info):
        several = split(COMPLETIONS, {"prompt_embeds": ["x", "y"], "prompt": ["a", "b"], "seed": 1}, info)
        assert bodies(several) == [
            {"prompt_embeds": "x", "seed": 1},
            {"prompt_embeds": "y", "seed": 1},
            {"seed": 1, "prompt": "a"},
            {"seed": 1, "prompt": "b"},
        ]
        assert indices(several) == [(0, 0), (1, 1), (2, 2), (3, 3)]

    @pytest.mark.parametrize("prompt", ["a", [1, 2]])
    def test_beside_one_prompt(self, prompt):
        several = split(COMPLETIONS, {"prompt": prompt, "prompt_embeds": "x", "n": 2}, NEVER | self.EMBEDS)
        assert bodies(several) == [{"prompt_embeds": "x"}] * 2 + [{"prompt": prompt}] * 2
        assert indices(several) == [(0, 0), (0, 1), (1, 2), (1, 3)]
        assert several.part_bytes == len(several.body.raw)

    @pytest.mark.parametrize("beside", [{}, {"prompt": None}, {"prompt": ""}, {"prompt": []}])
    def test_alone(self, beside):
        for embeds in ("x", ["x"]):
            assert split(COMPLETIONS, {"prompt_embeds": embeds, **beside}, NEVER | self.EMBEDS) is None
        several = split(COMPLETIONS, {"prompt_embeds": ["x", "y"], **beside}, NEVER | self.EMBEDS)
        assert bodies(several) == [{"prompt_embeds": "x"}, {"prompt_embeds": "y"}]

    def test_an_engine_that_may_not_know_them_gets_all_of_them(self):
        assert split(COMPLETIONS, {"prompt_embeds": "x", "prompt": ["a", "b"]}, {}) is None
        assert split(COMPLETIONS, {"prompt_embeds": ["x", "y"]}, {}) is None
        assert len(bodies(split(COMPLETIONS, {"prompt_embeds": [], "prompt": ["a", "b"]}, {}))) == 2
        assert split(COMPLETIONS, {"prompt_embeds": ["x", "y"]}, self.EMBEDS, reuse=False) is None


BOTH = {"prompt": ["a", "b"], "n": 2, "best_of": 3, "seed": 5}


class TestWhatAnEngineRunsItself:
    def test_choices_stay_whole_and_prompts_are_split_with_reuse(self):
        several = split(COMPLETIONS, BOTH, {})
        assert indices(several) == [(0, 0), (1, 2)]
        assert bodies(several) == [{**BOTH, "prompt": prompt} for prompt in "ab"]

    @pytest.mark.parametrize("n", ["x", 0, None, True])
    def test_a_number_that_the_engine_will_refuse_is_passed_on(self, n):
        several = split(COMPLETIONS, {"prompt": ["a", "b"], "n": n}, {})
        assert bodies(several)[1] == {"prompt": "b", "n": n}

    def test_nothing_is_split_without_reuse(self):
        assert split(COMPLETIONS, BOTH, {}, reuse=False) is None

    def test_all_is_split_for_an_engine_that_takes_one_at_a_time(self):
        several = split(COMPLETIONS, {"prompt": ["a", "b"], "n": 2}, NEVER, reuse=False)
        assert len(bodies(several)) == 4

    def test_one_engine_of_a_pool_decides_for_all(self):
        assert split(CHAT, {"n": 2}, {}) is None
        assert len(bodies(split(CHAT, {"n": 2}, {}, APART))) == 2
        assert len(bodies(split(CHAT, {"n": 2}, {}, NEVER, reuse=False))) == 2


@pytest.mark.parametrize(
    ("fields", "picks", "sent"),
    [
        ({"n": 2, "best_of": 3}, (True, True), [{"prompt": "a", "logprobs": 1}] * 3),
        ({"best_of": 2, "logprobs": 0}, (True, False), [{"prompt": "a", "logprobs": 0}] * 2),
        ({"n": 2, "best_of": 2}, (False, False), [{"prompt": "a"}] * 2),
    ],
    ids=["more are made than given", "logprobs were asked for", "as many as are given"],
)
def test_the_best_are_found_by_their_logprobs(fields, picks, sent):
    several = split(COMPLETIONS, {"prompt": "a", **fields})
    assert (several.picks, several.hides_logprobs) == picks
    assert bodies(several) == sent


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({"n": n}, "n") for n in (129, 0, 2.0, True)),
        ({"n_cmpl": "2"}, "n_cmpl"),
        ({"best_of": 129}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 1, "best_of": 2, "stream": True}, "best_of"),
        ({"n": 128, "prompt": ["a"] * (MAX_PARTS // 128 + 1)}, "prompt"),
        ({"prompt": ["a"] * MAX_PARTS + [["a"]]}, "prompt"),  # they are not looked at
    ],
)
def test_numbers_that_nobody_serves(fields, param):
    with pytest.raises(BadRequest) as caught:
        split(COMPLETIONS, {"prompt": "a", **fields})
    assert caught.value.param == param


def test_the_size_of_a_part_is_that_of_the_longest_prompt_and_all_other_fields():
    several = split(COMPLETIONS, {"prompt": ["a" * 1000, "b" * 2000], "suffix": "c" * 500})
    assert max(len(part.body.raw) for part in several.parts()) <= several.part_bytes <= 2600
    several = split(CHAT, {"n": 2, "user": "c" * 500})
    assert 500 < max(len(part.body.raw) for part in several.parts()) <= several.part_bytes < 600
