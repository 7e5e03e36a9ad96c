"""`kvpin replay`: how placement policies perform on a trace, and how many engines it needs.

    options → plan → read_trace → simulate → report

trace.py       a file of block hashes → requests
arrivals.py    when they arrive
cache.py       blocks of an engine: GPU and host tier
engine.py      prefill, decode and restores of an engine, on a virtual clock
policy.py      the interface of policies    simple.py, peers.py, kvpin.py  the policies    registry.py  their
names oracle.py      the hits that are possible simulator.py   one run options.py     flags → plan    plan.py
plan → runs capacity.py    how many engines keep a p99 doubts.py      why a trace cannot tell policies apart
batch.py       many runs, over processes report.py      tables, JSON, CSV    plot.py  PNG units.py       500k,
64GiB

The policy `kvpin` is the proxy's own `core.placement.placer.Placer`.
"""
