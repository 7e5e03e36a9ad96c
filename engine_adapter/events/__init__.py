"""KV events of engines: from the socket to typed events.

subscriber.py  a ZMQ stream without holes: sequence numbers, replay, restarts
zmq_inbox.py   receives off the event loop           options.py  settings and addresses of publishers
fields.py      msgpack → fields, in one pass; the keys beside a block's tokens, typed: LoRA, image, salt,
               embeddings
wire.py        fields → events, and back
"""
