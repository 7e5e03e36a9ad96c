"""HTTP towards engines.

transport.py      the seam: a request, its answer, headers as bytes
client.py         the client behind it: addresses and their idle connections
connection.py     one connection, its answers
prepare.py        a request for the engine, its TLS    control.py  kvpin's own requests
adapter.py        the base of adapters; what an engine says of its models
openai_answer.py  whether an answer is one; fields kvpin asks of it and hides from the client
error_bodies.py   engines' error bodies in one shape
sse.py            whole events of a stream
usage.py          tokens that answers report         prometheus_text.py  an engine's metrics
web_pages.py      which web page asks, loopback
"""
