"""The rules of routers inside kvpin."""

import pytest

from proxy.core.index.blocks import Chain
from proxy.core.placement.pairs import place_with_pairs
from proxy.core.placement.placer import Placer

PROMPT = Chain(tuple(range(1, 101)), 1601, 16)


@pytest.mark.parametrize(
    ("rule", "divides", "divides_next_turn"),
    [
        ("never", False, False),
        ("always", True, True),
        ("threshold", True, True),
        ("local", True, True),
        ("ppd", True, True),
        ("conserve", True, False),
        ("kvpin", False, False),
    ],
)
def test_what_a_rule_divides(script, rule, divides, divides_next_turn):
    assert set(script.LIVE) == {"never", "always", "threshold", "local", "ppd", "conserve", "kvpin"}
    placer = Placer(16)
    for name in "pd":
        placer.add(name, gpu_blocks=1000)

    def pair(*, goes_on=False):
        p, d = placer.candidate(0.0, "p"), placer.candidate(0.0, "d", is_last=goes_on)
        prefillers = placer.prefillers(0.0, [p], {"d"})
        placing = script.by_rule(rule, place_with_pairs)
        return placing([d], prefillers, PROMPT, placer.outlook(0.0)).pair

    assert (pair() is not None) == divides
    assert (pair(goes_on=True) is not None) == divides_next_turn
