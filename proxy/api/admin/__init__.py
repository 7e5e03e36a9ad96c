"""The admin API, `/admin/v1/*`: HTTP around `proxy.control`.

endpoint.py        a route as data: handler, body, answer
request_bodies.py  what requests may say
engine_routes.py   engines: list, add, remove, drain
key_routes.py      keys of clients: issue, list, remove
kv_routes.py       flush, offload, restore, pin, warm
request_routes.py  the last requests, dry runs, explanations
prefix_routes.py   the prefix tree
table_routes.py    prompt tables
use_routes.py      what tenants have used
event_routes.py    events for those who watch, as a stream
replay_routes.py   recorded traffic on simulated engines
openapi.py         the document of all routes
mount.py           guard, routing, errors, audit log

The structs that are answered are declared where they are filled, in `proxy.control`.
"""

from proxy.api.admin.engine_routes import engine_routes
from proxy.api.admin.event_routes import event_routes
from proxy.api.admin.key_routes import key_routes
from proxy.api.admin.kv_routes import kv_routes
from proxy.api.admin.mount import admin_mount
from proxy.api.admin.prefix_routes import prefix_routes
from proxy.api.admin.replay_routes import replay_routes
from proxy.api.admin.request_routes import request_routes
from proxy.api.admin.table_routes import table_routes
from proxy.api.admin.use_routes import use_routes
