"""Finds engines: in a file, in DNS, in Kubernetes. `proxy.control.discovered` lets them join and leave.

found.py         what a finder gives: the whole set of engines to use now, whenever it changes
engines_file.py  a file that is watched
dns.py           A, AAAA and SRV records, asked for again after their TTL
kubernetes.py    EndpointSlices, from list and watch     cluster.py  the API server they are on
finders.py       settings → finders

A finder raises SourceError if its source fails. It is asked again; until it answers, the last set counts.
"""

from proxy.fleet.discovery.finders import finders_of
from proxy.fleet.discovery.found import Finder, FoundEngine, FoundEngines, Source, SourceError

__all__ = ["Finder", "FoundEngine", "FoundEngines", "Source", "SourceError", "finders_of"]
