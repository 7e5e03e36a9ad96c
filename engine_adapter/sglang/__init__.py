"""SGLang as an engine.

adapter.py      the adapter; what is missing on a server, and which flag adds it
server_info.py  what the server reports about itself
requests.py     routes beside `/v1`, changes to requests, chats as its template gets them, cached tokens in
                answers; how the two halves of a request meet
windows.py      what its sliding windows hold, which no event tells
"""
