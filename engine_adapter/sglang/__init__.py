"""SGLang as an engine.

adapter.py   the adapter                          server_info.py  what the server reports about itself
findings.py  what is missing, and which flag adds it
requests.py  changes to requests                  answer.py       cached tokens in answers
loads.py     running and waiting requests         tokens.py       tokenises requests
routes.py    routes beside `/v1`
"""
