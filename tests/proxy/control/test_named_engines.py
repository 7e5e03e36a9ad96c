"""The engines that entries of settings and sources stand for."""

import pytest

from proxy.control.named_engines import Parts
from proxy.settings import EngineSettings, ManagedSettings

URL = "http://gpu7:8000"


def vllm(**more):
    return EngineSettings(kind="vllm", id="v", url=URL, **more)


def ids(engines):
    return [each.id for each in engines]


def test_an_entry_stands_for_the_models_of_a_router():
    router = EngineSettings(kind="llama_server", id="r", url=URL)
    named = router.model_copy(update={"id": "n", "model": "b"})
    parts = Parts()
    assert parts.learn(URL, ("org/a:Q8",))
    assert [(each.id, each.model) for each in parts.split(router)] == [("r-org.a.Q8", "org/a:Q8")]
    assert parts.learn(URL, ("a", "b"))
    assert ids(parts.split(router)) == ["r-a", "r-b"]
    assert parts.split(named) == [named]
    assert parts.learn(URL, ())  # it is no router any more
    assert parts.split(router) == [router]


def test_an_entry_stands_for_the_ranks_that_its_server_told():
    parts = Parts()
    assert not parts.learn(URL, ())
    assert not parts.learn(URL, (0,))
    assert parts.split(vllm()) == [vllm()]
    assert parts.learn(URL, (0, 1))
    assert not parts.learn(URL, (0, 1))
    assert not parts.learn(URL, ())
    assert ids(parts.split(vllm())) == ["v-dp0", "v-dp1"]
    assert [each.spec().options.rank for each in parts.split(vllm())] == [0, 1]
    assert parts.learn(URL, (0, 1, 2))
    assert ids(parts.split(vllm())) == ["v-dp0", "v-dp1", "v-dp2"]
    assert parts.learn(URL, (0,))
    assert parts.split(vllm()) == [vllm()]


@pytest.mark.parametrize(
    "entry",
    [
        vllm(dp_rank=1),
        EngineSettings(kind="openai_compatible", id="o", url=URL),
        ManagedSettings(kind="vllm", id="m", command="vllm serve --port {port}"),
    ],
)
def test_what_names_its_rank_or_can_have_none_is_one_engine(entry):
    parts = Parts()
    parts.learn(URL, (0, 1))
    assert parts.split(entry) == [entry]


def test_each_rank_has_the_settings_of_the_server_and_the_next_event_ports():
    entry = vllm(events="tcp://gpu7:5557", replay="tcp://gpu7:5657", api_key="k", share_kv=True)
    spec = entry.of_part(2).spec()
    assert (spec.api_key, spec.share_kv, spec.url) == ("k", True, URL)
    assert (spec.options.events, spec.options.replay) == ("tcp://gpu7:5559", "tcp://gpu7:5659")
    assert entry.spec().options.events == "tcp://gpu7:5557"
