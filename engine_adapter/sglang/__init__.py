"""SGLang as an engine.

adapter.py   the adapter                          server_info.py  what the server reports about itself
findings.py  what is missing, and which flag adds it
requests.py  changes to requests, chats as its template gets them
answer.py    cached tokens in answers
windows.py   what its sliding windows hold, which no event tells
rendezvous.py  how the two halves of a request meet
routes.py    routes beside `/v1`
"""
