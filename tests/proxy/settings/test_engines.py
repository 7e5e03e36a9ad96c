import pytest
from pydantic import ValidationError

from proxy.settings import DiscoverySettings, EngineSettings, ManagedSettings, Settings
from proxy.settings.engines import EnginesFile, option_names


def test_engines_without_id_are_numbered_by_kind_around_ids_taken():
    settings = Settings(
        engines=[
            EngineSettings(kind="vllm", url="http://a:1"),
            EngineSettings(kind="vllm", url="http://b:1", id="vllm-1"),
            EngineSettings(kind="vllm", url="http://c:1"),
            EngineSettings(kind="tensorrt-llm", url="http://d:1"),
        ],
        managed=[ManagedSettings(kind="embedded"), ManagedSettings(kind="embedded", id="main")],
    )
    assert [e.id for e in settings.engines] == ["vllm-0", "vllm-1", "vllm-2", "tensorrt_llm-0"]
    assert [e.id for e in settings.managed] == ["embedded-0", "main"]


def test_engines_of_a_file_are_named_after_their_addresses():
    engines = [{"kind": "vllm", "url": "http://gpu-1:8000"}, {"kind": "vllm", "url": "http://b", "id": "b"}]
    assert [each.id for each in EnginesFile(engines=engines).engines] == ["gpu-1.8000", "b"]
    with pytest.raises(ValidationError, match="are one engine"):
        EnginesFile(engines=[engines[0], {**engines[0], "id": "again"}])


def test_an_engine_that_is_found_has_the_settings_of_its_source():
    source = DiscoverySettings(kind="vllm", id="pool", source="dns://gpus:8000", api_key="k")
    found = source.engine("a/b", "10.0.0.1", 8000)
    assert (found.id, found.url, found.spec().api_key) == ("pool-a.b", "http://10.0.0.1:8000", "k")
    assert source.engine("x" * 80, "::1", 1).url == "http://[::1]:1"
    assert len(source.engine("x" * 80, "::1", 1).id) == 64


def test_a_rank_is_an_engine_with_addresses_of_its_own():
    server = EngineSettings(kind="vllm", url="http://gpu:8000", id="e", events="tcp://gpu:5557")
    assert server.may_have_ranks
    rank = server.of_rank(1)
    assert (rank.id, rank.model_extra["dp_rank"], rank.model_extra["events"]) == (
        "e-dp1",
        1,
        "tcp://gpu:5558",
    )
    assert not rank.may_have_ranks


def test_options_of_a_kind():
    assert "dp_rank" in option_names("vllm")
    assert option_names("llama-server") == option_names("llama_server")
    assert {*option_names("vllm"), *option_names("llama-server")} <= {*option_names("unknown")}
