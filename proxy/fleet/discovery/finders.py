"""The finder of each source that the settings name."""

from __future__ import annotations

from collections.abc import Iterator

from proxy.fleet.discovery.engines_file import FileFinder
from proxy.fleet.discovery.found import Finder
from proxy.fleet.discovery.kubernetes import KubernetesFinder
from proxy.settings import DiscoverySettings, KubernetesSource, Settings, SettingsError


def finders_of(settings: Settings) -> Iterator[tuple[str, Finder]]:
    """Source names and their finders. Raises SettingsError if a package is missing for one."""
    if settings.engines_file is not None:
        yield str(settings.engines_file), FileFinder(settings.engines_file)
    for entry in settings.discovery:
        yield entry.source, _finder(entry)


def _finder(entry: DiscoverySettings) -> Finder:
    source = entry.place
    if isinstance(source, KubernetesSource):
        return KubernetesFinder(entry, source)
    try:
        from proxy.fleet.discovery.dns import DnsFinder  # noqa: PLC0415 - it needs a package of an extra
    except ImportError as error:
        raise SettingsError(
            f"discovery {entry.source!r} needs dnspython: pip install 'kvpin[dns]'"
        ) from error
    return DnsFinder(entry, source)
