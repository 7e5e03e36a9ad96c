"""LMCache as the host and disk tier of vLLM. kvpin asks it over HTTP what it holds and tells it what to move.

client.py  what a node and its coordinator are, their routes and answers; chunks of a prompt
verbs.py   offload, restore, flush; pins that expire
vllm/tiered.py is the adapter that uses it; its settings are in vllm/options.py.
"""
