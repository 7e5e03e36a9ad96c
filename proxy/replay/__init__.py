"""`kvpin replay`: how placement policies perform on a trace, and how many engines it needs.

    plan → read_trace → simulate → report

trace.py             a file of block hashes → requests
figures.py           the figures of the engines that a replay simulates
plan.py              plan → runs
simulator.py         one run, on a virtual clock; when requests arrive
simulated_engine.py  prefill, decode and restores
cache.py             blocks of an engine: GPU and host tier
policy.py            the interface of policies, and kvpin's own
rules.py             policies by name; those of other routers are in benchmarks/other_routers.py
report.py            tables, JSON, CSV, curves for the page
advise.py            `kvpin advise`: what would let more of a recording come from cache

The policy `kvpin` is the proxy's own `core.placement.placer.Placer`.
"""
