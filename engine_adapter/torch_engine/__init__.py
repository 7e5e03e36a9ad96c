"""The embedded engine: a small, real serving engine on torch and transformers. Importing this is free.

requests.py    what goes in and comes out          options.py    how an engine is set up
kv_cache.py    blocks, prefix tree, tiers: pure    kv_node.py    tree nodes, pools, eviction order
kv_events.py   what the cache tells the outside    kv_admin.py   flush, offload, restore, pin, snapshot
model.py       loading a model                     attention.py  attention over paged KV
storage.py     where KV lies                       runner.py     one step of model execution
sampling.py    logits → tokens                     scheduler.py  which tokens run in a step
engine.py      the step loop, in a thread of its own
"""
