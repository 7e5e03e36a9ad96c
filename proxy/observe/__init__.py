"""Everything that people see of a running kvpin.

logs.py             structured logs, the text at start
metrics.py          Prometheus metrics: what is counted, what is read at each scrape
recorder.py         traffic recordings for `kvpin replay`
metric_families.py  their lines on the page
"""
