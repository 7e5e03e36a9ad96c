"""Everything that people see of a running kvpin.

logs.py             structured logs, the text at start
metrics.py          Prometheus metrics
recorder.py         traffic recordings for `kvpin replay`
metric_families.py  their lines on the page
live.py             events for those who watch
gauges.py           metrics that are read at each scrape
"""
