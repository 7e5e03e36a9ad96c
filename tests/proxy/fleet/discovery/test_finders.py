import sys

import pytest

from proxy.fleet.discovery import finders_of
from proxy.fleet.discovery.dns import DnsFinder
from proxy.fleet.discovery.engines_file import FileFinder
from proxy.fleet.discovery.kubernetes import KubernetesFinder
from proxy.settings import Settings, SettingsError


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
    monkeypatch.setitem(sys.modules, "proxy.fleet.discovery.dns", None)
    with pytest.raises(
        SettingsError, match=r"discovery 'dns://a:1' needs dnspython: pip install 'kvpin\[dns\]'"
    ):
        list(finders_of(settings("dns://a:1")))
    assert list(finders_of(settings("kubernetes:///c")))
