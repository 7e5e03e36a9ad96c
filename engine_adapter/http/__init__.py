"""HTTP towards engines.

transport.py      the seam: a request, its answer      client.py   the client behind it
connection.py     one connection, its answers          origin.py   an address, its idle connections
prepare.py        a request for the engine, its TLS    control.py  kvpin's own requests
models.py         what an engine says of its models    adapter.py  the base of adapters
headers.py        headers as bytes
openai_answer.py  fields kvpin asks of an answer and hides from the client
answer_shape.py   whether an answer is one           error_bodies.py   engines' error bodies in one shape
sse.py            whole events of a stream
usage.py          tokens that answers report         prometheus_text.py  an engine's metrics
web_pages.py      which web page asks, loopback
"""
