"""HTTP towards engines.

transport.py      the data plane's seam: streams bytes both ways    headers.py  headers as bytes
control.py        control requests: health, discovery, tokenise    tls.py  one TLS context per engine
openai_answer.py  fields kvpin asks of an answer and hides from the client
error_bodies.py   engines' error bodies in one shape
usage.py          cached tokens in answers           prometheus_text.py  an engine's metrics
"""
