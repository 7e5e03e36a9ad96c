"""Everything that people see of a running kvpin.

banner.py           the text at start
logs.py             structured logs
metrics.py          Prometheus metrics
recorder.py         traffic recordings for `kvpin replay`
metric_families.py  their lines on the page
loop_lag.py         how late the event loop is, and what blocked it
live.py             events for those who watch
gauges.py           metrics that are read at each scrape
"""
