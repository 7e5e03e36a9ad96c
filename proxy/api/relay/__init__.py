"""Passes requests on to another kvpin: the one that owns the engine, or keeps the response.

to_owner.py        requests for an engine that another kvpin owns
to_object_home.py  requests that name a response of another kvpin
pass_on.py         how they get there: the whole request, and the whole answer
"""
