"""Objects that engines keep for clients, such as responses, files and videos.

routes.py   which routes are open where kvpin has several tenants, and what they name and make
names.py    which objects a request names, in its path, its query and its body
homes.py    whose an object is, and which engine keeps it

Engines know no tenants. With several, a tenant reaches only what it made through kvpin. A route is refused if
kvpin cannot tell whose objects it reaches. With one tenant, or without keys, only responses are followed: to
the engine that made them.
"""

from __future__ import annotations

from proxy.request.stored.homes import AnswerNoter, Home, ObjectHomes
from proxy.request.stored.names import Name, check_form_field, may_name, name_in_path, names_items, names_of
from proxy.request.stored.routes import COLLECTIONS, FOLLOWED, STATELESS, Kind, check_route, open_route
