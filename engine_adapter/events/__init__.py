"""KV events of engines: from the socket to typed events.

subscriber.py  a ZMQ stream without holes: sequence numbers, replay, restarts
zmq_inbox.py   receives off the event loop           sources.py  where an engine publishes
fields.py      msgpack → fields, in one pass
wire.py        fields → events, and back             groups.py   engines with several KV cache groups
keys.py        the keys beside a block's tokens, typed: LoRA, image, salt, embeddings
options.py     settings of engines that publish over ZMQ
"""
