"""A file of engines is read again when it changes, and nothing but a whole file counts."""

import asyncio

import pytest

from proxy.fleet.discovery import SourceError, engines_file
from proxy.fleet.discovery.engines_file import FileFinder
from proxy.settings import SettingsError, read_engines


def named(found):
    return [each.entry.id for each in found]


async def test_each_change_is_found_as_toml_as_json_and_as_a_link(tmp_path, monkeypatch):
    monkeypatch.setattr(engines_file, "PAUSE_S", 0.01)
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
        (
            "e.toml",
            "[[engines]]\nkind = 'vllm'\nurl = 'http://a'\ntokeniser = 'x'\n",
            "did you mean 'tokenizer'",
        ),
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
