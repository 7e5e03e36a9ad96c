"""Several kvpins in front of the same engines act as one.

They share what the engines' events do not tell: requests in flight, what engines without events hold,
conversations, rates, and what tenants have used. Nothing is decided together: each kvpin places its requests
by what it knows, and all know nearly the same. `proxy/core/peers/` says what is told.

peers.py           one kvpin among several: listens, notices who is lost
announcer.py       what this kvpin tells the others
joining.py         when a newcomer is ready
peer.py            another one, as it sees it
pooled_engine.py   an engine of this kvpin on which requests of others run
owners.py          claims engines that only one kvpin may use
exchange_stats.py  what people see of it
bus.py             the seam: how frames reach the others
unix_bus.py        frames through Unix sockets, on one machine
redis_bus.py       frames through Redis or Valkey, between machines
"""
