"""One data-plane request.

calls.py    the request and its reply        tenants.py  API key → tenant → cache salt
session.py  which conversation it belongs to  records.py  what is kept of it for `kvpin requests`
forward.py  sends it to an engine and streams the answer back
"""
