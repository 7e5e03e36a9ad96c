"""Counts of calls: every call of Python code counts once, for its function and for those that led to it."""

import asyncio
from dataclasses import dataclass

import pytest


@pytest.fixture
def counted():
    import counted_kvpin

    return counted_kvpin


def leaf():
    return len("a call of C code does not count")


def branch():
    return leaf() + leaf()


async def waits():
    await asyncio.sleep(0)


async def outer():
    await waits()


@dataclass
class Made:
    field: int


def counts(counted, work):
    """Own calls and calls below, by the functions' names."""
    counter = counted.Counter()
    counter.begin()
    try:
        work()
    finally:
        count = counter.end()
    return {each.name.partition(" ")[0]: (each.own, each.below) for each in count.functions}


def test_calls_count_for_those_that_led_to_them(counted):
    found = counts(counted, lambda: (branch(), leaf()))
    assert (found["branch"], found["leaf"]) == ((1, 3), (3, 3))


def test_a_coroutine_that_goes_on_counts_again_and_so_do_those_that_wait_for_it(counted):
    found = counts(counted, lambda: asyncio.run(outer()))
    assert (found["outer"][0], found["waits"][0]) == (2, 2)


def test_generated_methods_have_the_names_of_their_classes(counted):
    assert counts(counted, lambda: Made(1))["Made.__init__"] == (1, 1)


def test_the_calls_of_an_idle_kvpin_are_subtracted_by_time(counted, script):
    calls, count = counted.Calls, counted.Count
    busy = count(2.0, [calls("served", 40, 80), calls("served", 2, 2), calls("tick", 30, 30)])
    idle = count(10.0, [calls("tick", 50, 50)])
    found = script.net(busy, idle, 10)
    assert found["served"] == pytest.approx((4.2, 8.2))
    assert found["tick"] == pytest.approx((2, 2))
    assert script.total(found) == pytest.approx(6.2)


def test_pieces_of_a_stream_cost_what_further_ones_add(script):
    stream = {script.PIECE: (1.0, 9.0), "serve": (99.0, 100.0)}
    paced = {script.PIECE: (11.0, 99.0), "serve": (389.0, 400.0)}
    assert script.per_piece(paced, stream) == 30
