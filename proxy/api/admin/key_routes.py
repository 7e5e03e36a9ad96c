"""Keys of clients that kvpin issues."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from proxy.api.admin.endpoint import Endpoint, answer, read_body
from proxy.api.admin.request_bodies import AddKey
from proxy.control.keys import IssuedKeys, KeyAnswer, KeyNotes, NewKey, RemovedKey
from proxy.core.quotas import TenantLimits
from proxy.fleet.fleet import Fleet
from proxy.request.tenants import Tenants


class KeyList(msgspec.Struct):
    """The issued keys; those of the settings are not among them.

    `needed`: requests need a key. `in_settings`: how many keys the settings have.
    """

    keys: list[KeyAnswer]
    needed: bool
    in_settings: int


def key_routes(keys: IssuedKeys, tenants: Tenants, fleet: Fleet) -> tuple[Endpoint, ...]:
    """Issues, lists and removes keys."""
    notes = KeyNotes(tenants, fleet)

    async def list_keys(_request: Request) -> Response:
        return answer(
            KeyList(keys.described(), needed=not tenants.open, in_settings=tenants.count_in_settings)
        )

    async def post_key(request: Request) -> Response:
        body = await read_body(request, AddKey)
        before = notes.before()
        key = await keys.add(
            tenant=body.tenant,
            name=body.name,
            models=body.models,
            expires=body.expires,
            limits=TenantLimits(body.requests_per_minute, body.tokens_per_minute, body.concurrent_requests),
            new_tenant=body.new_tenant,
        )
        key.notes = notes.since(before, key)
        added = answer(key, 201)
        added.headers["cache-control"] = "no-store"
        return added

    async def delete_key(request: Request) -> Response:
        return answer(await keys.remove(request.path_params["key_id"]))

    return (
        Endpoint(
            "GET", "/keys", list_keys, "The keys that this API issued, without the keys themselves.", KeyList
        ),
        Endpoint(
            "POST",
            "/keys",
            post_key,
            "Issues a key for a tenant and tells it once; 409 without `state_dir`.",
            NewKey,
            body=AddKey,
            statuses=(201,),
        ),
        Endpoint(
            "DELETE",
            "/keys/{key_id}",
            delete_key,
            "Removes an issued key, even if that cannot be saved; its requests in flight go on to their end.",
            RemovedKey,
        ),
    )
