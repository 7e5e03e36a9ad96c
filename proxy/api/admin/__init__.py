"""The control plane, `/admin/v1/*`: HTTP around `proxy.control`.

endpoint.py   a route as data            bodies.py    what comes in      answers.py   what goes out
engines.py  kv.py  requests.py  tables.py             one subject each
openapi.py    the document of all of it  app.py       guard, routes, errors
"""

from proxy.api.admin.app import admin_routes
from proxy.control import Control

__all__ = ["Control", "admin_routes"]
