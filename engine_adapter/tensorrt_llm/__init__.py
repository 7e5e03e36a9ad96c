"""TensorRT-LLM as an engine.

adapter.py   the adapter                       discovery.py  what the server is and which routes it has
fields.py    request fields the server takes   stats.py      load and cache figures
poller.py    asks for KV events                wire.py       the JSON of these events
events.py    these events as kvpin's           pushed.py     KV events that come over ZMQ instead
routes.py    routes beside `/v1`               context_phase.py  KV from one server to another
"""
