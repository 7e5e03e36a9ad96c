"""The admin API, `/admin/v1/*`: HTTP around `proxy.control`.

endpoint.py   a route as data: handler, body, answer     bodies.py    what requests may say
engines.py  kv.py  requests.py  prefixes.py  tables.py  events.py  replays.py   the routes, one subject each
openapi.py    the document of all routes                 app.py       guard, routing, errors
audit.py      a line in the log for each action

The structs that are answered are declared where they are filled, in `proxy.control`.
"""

from proxy.api.admin.app import admin_mount
from proxy.api.admin.engines import EngineRoutes
from proxy.api.admin.events import EventRoutes
from proxy.api.admin.kv import KvRoutes
from proxy.api.admin.prefixes import PrefixRoutes
from proxy.api.admin.replays import ReplayRoutes
from proxy.api.admin.requests import RequestRoutes
from proxy.api.admin.tables import TableRoutes

__all__ = [
    "EngineRoutes",
    "EventRoutes",
    "KvRoutes",
    "PrefixRoutes",
    "ReplayRoutes",
    "RequestRoutes",
    "TableRoutes",
    "admin_mount",
]
