"""The admin API, `/admin/v1/*`: HTTP around `proxy.control`.

endpoint.py   a route as data: handler, body, answer     bodies.py    what requests may say
engines.py  kv.py  requests.py  prefixes.py  tables.py  events.py  replays.py   the routes, one subject each
openapi.py    the document of all routes                 app.py       guard, routing, errors, audit log

The structs that are answered are declared where they are filled, in `proxy.control`.
"""

from proxy.api.admin.app import admin_mount
from proxy.api.admin.engines import engine_routes
from proxy.api.admin.events import event_routes
from proxy.api.admin.kv import kv_routes
from proxy.api.admin.prefixes import prefix_routes
from proxy.api.admin.replays import replay_routes
from proxy.api.admin.requests import request_routes
from proxy.api.admin.tables import table_routes

__all__ = [
    "admin_mount",
    "engine_routes",
    "event_routes",
    "kv_routes",
    "prefix_routes",
    "replay_routes",
    "request_routes",
    "table_routes",
]
