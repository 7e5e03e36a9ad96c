"""HTTP/1.1 towards clients: connections, requests and answers, TLS. It knows no route.

http1.py              the HTTP/1.1 protocol of a connection, and what the connections share
exchange.py           one request and its answer
listeners.py          the limit on connections; sockets, own or handed on
tls.py                TLS of the port
"""
