"""vLLM as an engine.

adapter.py     the adapter                            options.py   settings of this kind, routes beside `/v1`
discovery.py   asks the server what it is, and learns by requests what it does not say
findings.py    what is missing, and which flag adds it  metrics.py   reads its /metrics page
prompts.py     tokenises a request on the server      requests.py  changes to requests, embeddings
copies.py      counts blocks stored more than once
tiered.py      vLLM with LMCache below it
nixl.py        KV from one vLLM to another
kv_transfer.py how it was started to pass KV on
"""
