"""`kvpin replay`: how placement policies perform on a trace, and how many engines it needs.

    plan → read_trace → simulate → report

trace.py             a file of block hashes → requests
figures.py           the figures of the engines that a replay simulates
arrivals.py          when they arrive
plan.py              plan → runs
simulator.py         one run, on a virtual clock
simulated_engine.py  prefill, decode and restores
cache.py             blocks of an engine: GPU and host tier
hybrid_cache.py      blocks of an engine with sliding-window layers
policy.py            the interface of policies
policy_names.py      policies by name
kvpin.py             the policy of kvpin itself
report.py            tables, JSON, CSV, PNG, one HTML file
advise.py            `kvpin advise`: what would let more of a recording come from cache
rules.py             simple policies, and the rules of other routers

The policy `kvpin` is the proxy's own `core.placement.placer.Placer`.
"""
