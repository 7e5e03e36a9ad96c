"""Finds engines: in a file, in DNS, in Kubernetes. `proxy.control.reconciler` lets them join and leave.

found.py         what a finder gives: the whole set of engines to use now, whenever it changes
dns.py           A, AAAA and SRV records, asked for again after their TTL
kubernetes.py    EndpointSlices, from list and watch
finders.py       settings → finders; a file that is watched

A finder raises SourceError if its source fails. It is asked again; until it answers, the last set counts.
"""

from proxy.fleet.discovery.finders import finders_of
from proxy.fleet.discovery.found import Finder, FoundEngine, FoundEngines, Source, SourceError
