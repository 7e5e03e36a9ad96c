"""One data-plane request.

calls.py           the request and its reply
session.py         the conversation it belongs to
admitted.py        what it holds from its head to its end: its tenant's quota, memory for its body
forward.py         sends a request to an engine, streams the answer back
tenants.py         API key → tenant → cache salt
answer_headers.py  which of the answer's headers the client gets
error_table.py     error class → code, status
dialects.py        how each API words an error
retries.py         which failures let another engine be tried
urgency.py         priority, deadline and cost, in the client's words
migration.py       which streams another engine goes on with when theirs dies
transcript.py      what a stream's client has
splice.py          joins the rest to it
kept_bodies.py     the last requests' bodies
comparison.py      why a request's cache missed
diagnostics.py     the same, as a field of its answer
translate/         requests of other APIs, served as chats
alarm.py           ends a step of a request's life that takes too long
records.py         the last requests, for `GET /admin/v1/requests`
"""
