"""One data-plane request.

calls.py           the request and its reply, the conversation it belongs to
stages.py          what an answer passes on its way to the client: its headers; events, cut once
gate.py            the permission to run: the tenant's quota and memory for the body, held to the end;
                   priority, deadline and cost, in the client's words
bodies.py          JSON bodies: unpacked, whole characters, their shape, and how long their lists may be
tenants.py         API key → tenant → cache salt; the salts of each tenant, for flushing the tenant
engine_errors.py   which answers of an engine let another one be tried, and the error when all fail; earlier
                   calls of tools whose arguments no template can read
migration.py       which streams go on on another engine after their engine died; joins the rest to
                   the part that the client has
comparison.py      why a request's cache missed
diagnostics.py     the reason of a cache miss, and what the cache got, as fields of the answer
normalising.py     which rules change whose prompts
values_back.py     puts values back where an answer repeats a reference to one
known_routes.py    routes for several tenants, routes that take only POST, and what a wrong path means; what
                   engines keep: which of it several tenants may name, and which engine keeps a response
translate/         requests of other APIs, served as chats
records.py         the last requests, for `GET /admin/v1/requests`
"""
