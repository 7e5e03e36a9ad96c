import pytest

from proxy.settings import (
    EngineSettings,
    ManagedSettings,
    Settings,
    check_settings,
)
from proxy.settings.engine_settings import repeated_engines


def engine(url="http://127.0.0.1:8000", kind="vllm", **fields):
    return EngineSettings(kind=kind, url=url, **fields)


def test_engines_without_id_are_numbered_by_kind_around_ids_taken():
    settings = Settings(
        engines=[
            engine("http://a:1"), engine("http://b:1", id="vllm-1"), engine("http://c:1"),
            engine("http://d:1", kind="tensorrt-llm"),
        ],
        managed=[ManagedSettings(kind="embedded"), ManagedSettings(kind="embedded", id="main")],
    )  # fmt: skip
    assert [e.id for e in settings.engines] == ["vllm-0", "vllm-1", "vllm-2", "tensorrt_llm-0"]
    assert [e.id for e in settings.managed] == ["embedded-0", "main"]


@pytest.mark.parametrize(
    "url",
    ["http://localhost:8000", "http://127.0.0.1:8000/", "http://[::1]:8000/v1", "http://LOCALHOST:8000/v1/"],
)
def test_one_engine_under_two_names(url):
    assert list(repeated_engines([engine(id="a"), engine(url, id="b")])) == [
        "'a' and 'b' are one engine, at http://127.0.0.1:8000: name it once"
    ]
    assert list(repeated_engines([engine(), engine(url, kind="openai_compatible")])) == [
        "two engines are one engine, at http://127.0.0.1:8000: name it once"
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"dp_rank": 0}, {"dp_rank": 1}),
        ({"model": "a"}, {"model": "b"}),
        ({"headers": {"x-to": "a"}}, {"headers": {"x-to": "b"}}),
        ({"url": "http://127.0.0.1:8000/a"}, {"url": "http://127.0.0.1:8000/b"}),
        ({"url": "http://127.0.0.1"}, {"url": "https://127.0.0.1"}),
    ],
)
def test_several_engines_of_one_server(one, other):
    assert list(repeated_engines([engine(**one), engine(**other)])) == []
    assert list(repeated_engines([engine(**one), engine(**one)])) != []


def test_all_that_does_not_go_together_is_told_at_once():
    flags = {"record_traffic": "t.gz", "workers": 2, "exchange": {"url": "unix:/x"}}
    assert len(check_settings(**flags, engines=[engine(), engine()])[1]) == 4  # workers may record
