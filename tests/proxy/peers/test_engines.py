"""Engines as kvpins tell each other of them."""

import pytest

from proxy.core.peers.matching import match
from proxy.core.peers.messages import ToldEngine
from proxy.fleet.fleet import Fleet
from proxy.peers.engines import address_of, described
from proxy.settings import EngineSettings
from tests.fakes import INFO, FakeAdapter


@pytest.mark.parametrize("url", ["http://gpu7:8000", "http://127.0.0.1:8000"])
def test_ranks_of_one_server_are_engines_of_their_own(url):
    specs = [EngineSettings(kind="vllm", id="v", url=url).of_rank(rank).spec() for rank in (0, 1)]
    told = [ToldEngine(spec.id, *address_of(spec), "m", 16) for spec in specs]
    assert [match(each, told) for each in told] == told


def test_an_engine_has_a_model_once_it_is_connected():
    fleet = Fleet()
    engine = fleet.add(FakeAdapter("a", "http://gpu:1"))
    (told,) = described(fleet, lambda _: None)
    assert told == ToldEngine("a", "http://gpu:1", is_local=False, model=None, tokens_per_block=None)
    fleet.join(engine, INFO)
    (told,) = described(fleet, lambda _: None)
    assert (told.model, told.tokens_per_block) == ("m", 16)
