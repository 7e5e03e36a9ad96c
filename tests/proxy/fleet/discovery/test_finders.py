import asyncio
import sys

import pytest

from proxy.fleet import discovery
from proxy.fleet.discovery import FileFinder, KubernetesFinder, SourceError, finders_of
from proxy.fleet.discovery_dns import DnsFinder
from proxy.settings import Settings, SettingsError, read_engines


def settings(*sources, **more):
    return Settings(discovery=[{"source": source, "kind": "vllm"} for source in sources], **more)


def test_each_source_has_its_finder_which_equals_that_of_the_same_settings(tmp_path):
    def found():
        return dict(
            finders_of(settings("dns://a:1", "srv://b", "kubernetes:///c", engines_file=tmp_path / "e.toml"))
        )

    kinds = [type(finder) for finder in found().values()]
    assert kinds == [FileFinder, DnsFinder, DnsFinder, KubernetesFinder]
    assert found() == found()


def test_without_dnspython_the_settings_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "proxy.fleet.discovery_dns", None)
    with pytest.raises(
        SettingsError, match=r"discovery 'dns://a:1' needs dnspython: pip install 'kvpin\[dns\]'"
    ):
        list(finders_of(settings("dns://a:1")))
    assert list(finders_of(settings("kubernetes:///c")))


def named(found):
    return [each.entry.id for each in found]


async def test_each_change_is_found_as_toml_as_json_and_as_a_link(tmp_path, monkeypatch):
    monkeypatch.setattr(discovery, "PAUSE_S", 0.01)
    one, two, link = tmp_path / "1.json", tmp_path / "2.json", tmp_path / "engines.json"
    one.write_text('{"engines": [{"kind": "vllm", "url": "http://gpu1:8000"}]}')
    two.write_text(
        '{"engines": [{"kind": "vllm", "url": "http://gpu1:8000/v"}, '
        '{"kind": "nim", "url": "http://b", "id": "n"}]}'
    )
    link.symlink_to(one)
    sets = FileFinder(link).found()
    assert named(await anext(sets)) == ["gpu1.8000"]
    (tmp_path / "new").symlink_to(two)
    (tmp_path / "new").replace(link)
    assert named(await asyncio.wait_for(anext(sets), 20)) == ["gpu1.8000.v", "n"]
    two.write_text('{"engines": []}')
    assert await asyncio.wait_for(anext(sets), 20) == ()
    link.unlink()
    with pytest.raises(SourceError, match=r"engines\.json' cannot be read: No such file"):
        await asyncio.wait_for(anext(sets), 20)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("e.toml", "", r"has no engines: write engines = \[\] if"),
        ("e.toml", "[[engines]]\nkind = 'vllm'\n", r"setting 'engines\[0\].url' .* cannot be used"),
        ("e.toml", "engines = [{kind='vllm', url='http://a', tokeniser='x'}]", "did you mean 'tokenizer'"),
        ("e.toml", "[[engines", "is not TOML"),
        ("e.json", "{", "is not JSON"),
        ("e.json", "[" * 100_000, "nested too deeply"),
        ("e.toml", "engines = " + "[" * 100_000, "nested too deeply"),
        ("e.json", "[]", "must be an object"),
        (
            "e.json",
            '{"engines": [{"kind": "vllm", "url": "http://a"}, {"kind": "vllm", "url": "http://a"}]}',
            "two engines have the id 'a'",
        ),
    ],
)
def test_what_is_refused(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(SettingsError, match=said):
        read_engines(tmp_path / name)
