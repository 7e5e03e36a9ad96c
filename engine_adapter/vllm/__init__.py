"""vLLM as an engine.

adapter.py     the adapter                                   discovery.py  asks the server what it is
findings.py    what keeps it from being used fully           trials.py     what only requests tell of it
metrics.py     its /metrics page                             ranks.py      data-parallel ranks
prompts.py     a request → its token ids, by the server      requests.py   what goes along with a request
event_watch.py what the adapter itself learns of events      flush.py      forgetting everything
"""
