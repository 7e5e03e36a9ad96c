"""Finds engines: in a file, in DNS, in Kubernetes. `proxy.control.discovered` lets them join and leave.

kubernetes.py    EndpointSlices, from list and watch
found.py         what a finder gives: the whole set of engines to use now, whenever it changes
finders.py       settings → finders: of a file that is watched, of DNS

A finder raises SourceError if its source fails. It is asked again; until it answers, the last set counts.
"""

from proxy.fleet.discovery.finders import finders_of
from proxy.fleet.discovery.found import Finder, FoundEngine, FoundEngines, Source, SourceError
