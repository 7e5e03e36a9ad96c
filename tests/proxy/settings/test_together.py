import pytest

from proxy.settings import EngineSettings, SettingsError, check_settings, read_engines
from proxy.settings.together import faults_between


def engine(url="http://127.0.0.1:8000", kind="vllm", **fields):
    return EngineSettings(kind=kind, url=url, **fields)


@pytest.mark.parametrize(
    "url",
    ["http://localhost:8000", "http://127.0.0.1:8000/", "http://[::1]:8000/v1", "http://LOCALHOST:8000/v1/"],
)
def test_one_engine_under_two_names(url):
    assert list(faults_between([engine(id="a"), engine(url, id="b")])) == [
        "'a' and 'b' are one engine, at http://127.0.0.1:8000: name it once"
    ]
    assert list(faults_between([engine(), engine(url, kind="openai_compatible")])) == [
        "two engines are one engine, at http://127.0.0.1:8000: name it once"
    ]


def test_the_port_of_a_scheme():
    assert list(faults_between([engine("https://GPU-1:443"), engine("https://gpu-1")])) != []


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
    assert list(faults_between([engine(**one), engine(**other)])) == []
    assert list(faults_between([engine(**one), engine(**one)])) != []


def test_all_that_does_not_go_together_is_told_at_once():
    flags = {
        "record_traffic": "t.gz",
        "workers": 2,
        "exchange": {"url": "unix:/x"},
        "engines": [engine(), engine()],
    }
    assert len(check_settings(**flags)[1]) == 5


def test_an_engine_twice_in_a_file_of_engines(tmp_path):
    file = tmp_path / "engines.toml"
    file.write_text('[[engines]]\nkind = "vllm"\nurl = "http://gpu-1"\n' * 2)
    with pytest.raises(SettingsError, match="two engines have the id 'gpu-1'"):
        read_engines(file)
