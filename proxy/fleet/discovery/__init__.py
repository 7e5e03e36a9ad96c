"""Finds engines: in a file, in DNS, in Kubernetes. `proxy.control.discovered` lets them join and leave.

kubernetes.py    EndpointSlices, from list and watch
finders.py       settings → finders; a file that is watched

A finder raises SourceError if its source fails. It is asked again; until it answers, the last set counts.
"""

from proxy.fleet.discovery.finders import Finder, FoundEngine, FoundEngines, Source, SourceError, finders_of
