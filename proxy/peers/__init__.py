"""Several kvpins in front of the same engines act as one.

They share what the engines' events do not tell: requests in flight, what engines without events hold,
conversations, rates, and what tenants have used. Nothing is decided together: each kvpin places its requests
by what it knows, and all know nearly the same. `proxy/core/peers/` says what is told.

peers.py          one kvpin among several: listens, notices who is lost
voice.py          what it tells the others      joining.py  when a newcomer is ready
peer.py           another one, as it sees it    site.py     an engine on which that one's requests run
owners.py         claims engines that only one kvpin may use
stats.py          what people see of it
exchange.py       the seam: how frames reach the others
unix_sockets.py   between the kvpins of one machine
redis_channel.py  between those of several, through Redis or Valkey
"""
