"""The protocol between kvpins in front of the same engines, without the sockets.

A peer's request is replayed by the same steps of the `Placer` as an own one, so that load, pending blocks,
conversations, demand, rates and learned contents follow without a second mechanism.

messages.py    what is told, also of a kvpin's own requests, and its bytes; which engines of two kvpins are
               the same; which of several kvpins owns an engine that only one may use
"""
