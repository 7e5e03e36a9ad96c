"""The HTTP surface.

openai.py    /v1/*: the data plane             admin/      /admin/v1/*: the control plane
ops.py       /health/*, /metrics               auth.py     keys, loopback
errors.py    exceptions → error answers        http1.py    the HTTP/1.1 protocol
"""
