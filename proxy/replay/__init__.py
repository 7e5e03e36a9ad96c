"""`kvpin replay`: how placement policies perform on a trace, and how many engines it needs.

    plan → read_trace → simulate → report

trace.py             a file of block hashes → requests
arrivals.py          when they arrive
plan.py              plan → runs
simulator.py         one run, on a virtual clock
batch.py             many runs, over processes
simulated_engine.py  prefill, decode and restores
cache.py             blocks of an engine: GPU and host tier
policy.py            the interface of policies
policy_names.py      policies by name
kvpin.py             the policy of kvpin itself
oracle.py            the hits that are possible
capacity.py          how many engines keep a p99
doubts.py            why a trace cannot tell policies apart
report.py            tables, JSON, CSV
plot.py              PNG
curves.py            rows → lines of plots
html_report.py       one HTML file, from report.html
units.py             sizes in text: 500k, 64GiB
simple.py            simple policies: round robin and others
other_routers.py     the rules of other routers

The policy `kvpin` is the proxy's own `core.placement.placer.Placer`.
"""
