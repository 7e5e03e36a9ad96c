"""Everything that people see of a running kvpin.

banner.py           the text at start
logs.py             structured logs
startup_bar.py      the bar on a terminal until engines are ready
metrics.py          Prometheus metrics
recorder.py         traffic recordings for `kvpin replay`
metric_families.py  their lines on the page
loop_lag.py         how late the event loop is, and what blocked it
reasons.py          why a request was placed where it was
merged_metrics.py   metrics pages of several workers
reuse.py            reuse available, selected, delivered
live.py             events for those who watch
gauges.py           metrics that are read at each scrape
"""
