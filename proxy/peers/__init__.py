"""Several kvpins in front of the same engines act as one.

They share the facts that engines' events lack: requests in flight, what engines without events hold,
conversations, rates, and what tenants have used. Each kvpin decides alone; since all know nearly the
same, they decide alike. `proxy/core/peers/` defines the messages.

peers.py           one kvpin among several: tells, listens, notices who is lost
peer.py            another kvpin, as seen here
owners.py          claims engines that only one kvpin may use
bus.py             the seam: how frames reach the others; frames through Unix sockets, on one machine; proves
                   that an order to add an engine is the operators'. Imports no redis
redis_bus.py       frames through Redis or Valkey, between machines
"""
