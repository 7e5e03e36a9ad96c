"""Several kvpins in front of the same engines act as one.

They share what the engines' events do not tell: requests in flight, what engines without events hold,
conversations, rates, and what tenants have used. Nothing is decided together: each kvpin places its requests
by what it knows, and all know nearly the same. `proxy/core/peers/` says what is told.

peers.py          one kvpin among several: tells, listens, notices who is lost
contents.py       what a newcomer is told of engines without events and of conversations
owners.py         claims engines that only one kvpin may use
exchange.py       the seam: how frames reach the others
unix_sockets.py   between the kvpins of one machine
redis_channel.py  between those of several, through Redis or Valkey
"""
