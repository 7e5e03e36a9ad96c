"""vLLM as an engine.

adapter.py     the adapter; what is missing on a server, and which flag adds it
options.py     settings of this kind, those of an LMCache, routes beside `/v1`
discovery.py   asks the server what it is, and learns by requests what it does not say; its /metrics page
prompts.py     tokenises a request on the server      requests.py  changes to requests, embeddings
copies.py      counts blocks stored more than once
tiered.py      vLLM with LMCache below it
kv_transfer.py how it was started to pass KV on; KV from one vLLM to another
"""
