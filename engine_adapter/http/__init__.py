"""HTTP towards engines.

prepare.py        a request for the engine: headers as bytes, address, TLS; the seam: request and answer
client.py         the client behind it: addresses and their idle connections
connection.py     one connection, its answers
control.py        kvpin's own requests; an engine's metrics
adapter.py        what an engine says of its models and its health, and what its events have told
openai_answer.py  whether an answer is one; fields kvpin asks of it and hides from the client
answer_fields.py  engines' errors in one shape, tokens that answers report
sse.py            whole events of a stream
web_pages.py      which web page asks, loopback
"""
