"""The control plane's logic: what operators ask, done through the same fleet, index and forwarder.

context.py     the collaborators             operations.py  long work with progress, bounded history
targets.py     what an operation acts on     kv.py          flush, offload, restore
warm.py        prefill ahead of need         pinning.py     pins over engines
engines.py     add, remove, drain            tables.py      prompt tables, on all engines or on none
routing.py     where would this go?          explain.py     why did the cache miss?
stats.py       what everything holds
"""

from proxy.control.context import Control

__all__ = ["Control"]
