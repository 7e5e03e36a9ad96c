"""The admin API, `/admin/v1/*`: HTTP around `proxy.control`.

endpoint.py        a route as data: handler, body, answer; what requests may say
engine_routes.py   engines: list, add, remove, drain; flush, offload, restore, pin, warm; the prefix tree
key_routes.py      what clients are given: keys, prompt tables
request_routes.py  the last requests, dry runs, explanations; events as a stream, use, replays
mount.py           guard, routing, errors, audit log; the document of all routes

The structs that are answered are declared where they are filled, in `proxy.control`.
"""

from proxy.api.admin.engine_routes import engine_routes, kv_routes, prefix_routes
from proxy.api.admin.key_routes import key_routes, table_routes
from proxy.api.admin.mount import admin_mount
from proxy.api.admin.request_routes import event_routes, replay_routes, request_routes, use_routes
