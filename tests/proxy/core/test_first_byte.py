import random

import pytest
from msgspec.structs import replace

from proxy.core.first_byte import Moments, Part, parts_of

STREAM = Moments(
    came=10.0, arrived=10.5, prepared=11.5, queued_s=2.0, placed=13.75, gathered=14.75, sent=18.75,
    began=26.75, prefill_s=6.0, decode_s=1.0,
)  # fmt: skip
AT_ONCE = dict.fromkeys(("came", "arrived", "prepared", "placed", "gathered", "sent", "began"), 5.0)


def test_each_part_of_a_stream():
    assert parts_of(STREAM) == {
        Part.READ: 0.5,
        Part.TOKENISE: 1.0,
        Part.QUEUE: 2.0,
        Part.PLACE: 0.25,
        Part.GATHER: 1.0,
        Part.HOLD: 4.0,
        Part.PREFILL: 6.0,
        Part.ENGINE: 2.0,
    }


@pytest.mark.parametrize(
    ("changes", "part", "seconds"),
    [
        ({"is_whole": True}, Part.DECODE, 1.0),
        ({"has_failed": True}, Part.FAILED, 0.25),
        ({"legs_s": 3.0}, Part.FIRST_LEG, 3.0),
        ({"legs_s": 3.0}, Part.HOLD, 1.0),
        ({"prefill_s": None}, Part.ENGINE, 8.0),
        ({"prefill_s": 60.0}, Part.PREFILL, 8.0),  # the engine's clock says more than passed here
        ({"is_whole": True, "decode_s": None}, Part.ENGINE, 2.0),
    ],
)
def test_what_an_engine_reports_and_what_failed(changes, part, seconds):
    assert parts_of(replace(STREAM, **changes))[part] == pytest.approx(seconds)


def test_what_took_no_time_is_left_out():
    assert parts_of(Moments(**AT_ONCE)) == {}
    assert parts_of(Moments(**AT_ONCE | {"began": 6.0})) == {Part.ENGINE: 1.0}


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_add_up_to_the_measured_time(seed):
    draw = random.Random(seed)  # noqa: S311
    times = sorted(draw.uniform(0, 9) for _ in AT_ONCE)
    reported = {name: draw.choice([None, draw.uniform(0, 9)]) for name in ("prefill_s", "decode_s")}
    moments = Moments(
        **dict(zip(AT_ONCE, times, strict=True)),
        queued_s=draw.uniform(0, times[3] - times[2]),
        is_whole=draw.random() < 0.5,
        **reported,
    )
    parts = parts_of(moments)
    assert sum(parts.values()) == pytest.approx(moments.began - moments.came)
    assert all(seconds > 0 for seconds in parts.values())
