"""HTTP/1.1 towards clients: connections, requests and answers, TLS. It knows no route.

http1.py              the HTTP/1.1 protocol of a connection
port.py               what the connections share
exchange.py           one request and its answer
listeners.py          sockets, own or handed on
tls.py                TLS of the port
"""
