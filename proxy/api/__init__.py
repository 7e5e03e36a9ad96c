"""The HTTP surface.

site.py      what is served where            http1.py    the HTTP/1.1 protocol of a connection
openai.py    /v1/*: the data plane           exchange.py one request and its answer
paths.py     which of its paths are open     websockets.py   which of them are passed on
models.py    /v1/models                      bodies.py    JSON bodies, and how long their lists may be
ops.py       /health/*, /metrics             asgi.py     ASGI on exchanges, for all but the data plane
admin/       /admin/v1/*: the control plane  auth.py     keys, loopback
errors.py    exceptions → error answers      cors.py      which web pages may use the data plane
crowd.py     the limit on connections        handshake.py    TLS handshakes under it
responses.py /v1/responses/{id}, kept here   forms.py     the model that a form names
page.py      /ui/: the page, files in static/
listeners.py sockets, own or handed on       tls.py       TLS of the port
peer_port.py for other kvpins of the machine elsewhere.py requests that another kvpin answers
passing.py   how they get there              keepers.py   responses that another kvpin keeps
siblings.py  the other workers               together.py  one worker answers for all
merged_events.py  likewise, a stream           changes.py  what one that is started later must know
uvicorn_port.py  what connections take from uvicorn
"""
