"""What reports are compared with. Over real sockets, token ids too: tests/proxy/test_flow.py."""

from array import array
from types import SimpleNamespace

import pytest

from engine_adapter import Hold
from proxy.core.audit import Unchecked
from proxy.core.placement.decision import Cost, Placement
from proxy.fleet.fleet import Fleet
from proxy.fleet.ingest import Ingest
from proxy.prompt import Prompt
from proxy.steps.checks import check_prediction, check_tokens
from tests.fakes import add_ready

PROMPT = Prompt(array("i", range(40)))


def checked(more, predicted=32):
    """A request and its lease, about which all is well, but for what is taken from `more`."""
    placement = Placement(Cost("a"), predicted, 40, tuple, "lowest cost", firm=more.pop("firm", True))
    placed = SimpleNamespace(may_be_evicted=more.pop("may_be_evicted", False))
    lease = SimpleNamespace(placement=placement, placed=placed, evicted_since=False)
    return SimpleNamespace(prompt=more.pop("prompt", PROMPT)), lease


def check(engine, *, ingest, predicted=32, reported=32, **more):
    """Checks a prediction about which all is well, but for what `more` says."""
    ready, lease = checked(more, predicted)
    record = SimpleNamespace(
        **{"tokens_agree": True, "error": None, "runs_prompt": True, "placement": None} | more
    )
    return check_prediction(ingest, engine, ready, lease, record, reported)


@pytest.fixture
def fleet():
    return Fleet()


@pytest.fixture
def ingest(fleet):
    return Ingest(fleet, None)


@pytest.fixture
def engine(fleet):
    return add_ready(fleet, "a")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"reported": None}, Unchecked.NOT_REPORTED),
        ({"prompt": None}, Unchecked.PROMPT_UNKNOWN),
        ({"tokens_agree": False}, Unchecked.TOKENS_DIFFER),
        ({"firm": False}, Unchecked.NOT_FIRM),
        ({"may_be_evicted": True}, Unchecked.MAY_BE_EVICTED),
        ({"reported": None, "error": "no"}, Unchecked.FAILED),
        ({"reported": None, "runs_prompt": False}, Unchecked.NO_PROMPT),
        ({"tokens_agree": False, "firm": False}, Unchecked.TOKENS_DIFFER),
        ({"ingest": None}, Unchecked.REUSE_OFF),
        # What may be doubted and is not. Nothing can be evicted of a prompt of which nothing is cached.
        ({"tokens_agree": None}, None),
        ({"may_be_evicted": True, "predicted": 0}, None),
    ],
)
def test_what_is_no_firm_prediction_is_not_compared(engine, ingest, more, why):
    assert check(engine, **{"ingest": ingest} | more) is why
    assert engine.audit.view().checked == (why is None)


def test_one_that_may_be_evicted_is_marked_as_not_firm(engine, ingest):
    placement = Placement(Cost("a"), 32, 40, tuple, "lowest cost")
    record = SimpleNamespace(tokens_agree=True, error=None, runs_prompt=True, placement=placement)
    ready, lease = checked({"may_be_evicted": True})
    check_prediction(ingest, engine, ready, lease, record, 16)
    assert record.placement.firm is False


@pytest.mark.parametrize("hold", [Hold(None), Hold(None, answer=SimpleNamespace(prompt_tokens=lambda: None))])
def test_token_ids_that_the_engine_does_not_tell_are_not_compared(hold):
    record = SimpleNamespace(prompt=PROMPT, tokens_agree=None)
    check_tokens(SimpleNamespace(prompts=SimpleNamespace()), None, hold, record)
    assert record.tokens_agree is None
