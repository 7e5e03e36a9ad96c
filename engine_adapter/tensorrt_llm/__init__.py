"""TensorRT-LLM as an engine.

adapter.py   the adapter
discovery.py what the server is and which routes it has; load and cache figures; routes beside `/v1`
requests.py  request fields the server takes; KV from one server to another
poller.py    KV events: asked for, or pushed over ZMQ
events.py    the JSON of these events, and these events as kvpin's
"""
