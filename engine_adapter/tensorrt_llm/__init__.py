"""TensorRT-LLM as an engine.

adapter.py   the adapter                       discovery.py  what the server is and which routes it has
fields.py    request fields the server takes   stats.py      load and cache figures
poller.py    KV events: asked for, or pushed over ZMQ
events.py    the JSON of these events, and these events as kvpin's
routes.py    routes beside `/v1`               context_phase.py  KV from one server to another
"""
