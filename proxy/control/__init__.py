"""The control plane's logic: what operators ask, done through the same fleet, index and flow as requests.

operations.py      what an operation acts on, as it is named; long work, its progress and history
target_engines.py  a target → the engines it concerns
kv.py              flush, offload, restore; warm: compute a prefix ahead of need; pins over engines
engines.py         what is told of engines, and what everything holds
keys.py            keys of clients: issue, list, remove; prompt tables, on all engines or on none
named_engines.py   which engines should exist, as settings, sources and operators name them
reconciler.py      brings the fleet there: engines join, change, drain and leave
explain.py         where would this request go, and why did the cache of past ones miss?
live.py            events for those who watch
prefixes.py        the prefix tree of the last prompts
replays.py         recorded traffic on simulated engines

Each class takes the few collaborators it uses. The structs named `…Answer` are what the admin API answers.
"""
