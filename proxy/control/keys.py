"""What clients are given: keys that the admin API issues and removes, and prompt tables."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
import structlog

from engine_adapter import Capability, EngineError, EngineRejected, EngineUnavailable, PromptTable
from engine_adapter.off_loop import TABLE_BYTES_PER_MS, off_loop
from proxy.core.books import MAX_KEYS, IssuedKey, KeyBook
from proxy.core.quotas import TenantLimits
from proxy.errors import BadRequest, Conflict, NotFound, ProxyError
from proxy.fleet.engine import Engine, EngineState
from proxy.fleet.fleet import Fleet
from proxy.fleet.state_files import KeyBookFile, TableFiles
from proxy.prompt import RegisteredTables
from proxy.prompt.registered_tables import read_table
from proxy.request.tenants import ApiKey, Tenants
from proxy.runtime import within
from proxy.settings import SettingsError

# --- keys of clients that the admin API issues and removes ----------------------------------------------

log = structlog.get_logger(__name__)

# Where a worker has another one look into the book.
KEYS_PATH = "/workers/keys"
# The tenant of keys where neither the settings nor the request name one.
DEFAULT_TENANT = "default"
NO_LIMITS = TenantLimits()
# Every issued key begins so.
KEY_PREFIX = "kvp-"
_SECRET_BYTES, _ID_BYTES, _ENDING = 32, 6, 4
# A later end counts as this one: in UTC, or rounded, it may be no date any more.
_LAST = datetime(9999, 12, 30, tzinfo=UTC).timestamp()
# Between two looks whether another kvpin has changed the file.
_LOOK_S = 1.0
_SAVED_ELSEWHERE = (
    "this kvpin has no state_dir: it does not save the removal, and those of its group do that have one"
)
_UNSAVED = (
    "the key opens nothing now, but its removal is not saved: {}; kvpin tries again every second, and "
    "a restart before it succeeds would open the key again"
)
# The version of a file that was never read.
_NEVER = (0, 0)


class KeyAnswer(msgspec.Struct, kw_only=True):
    """An issued key without the key itself.

    `ending` is its last four characters. Without `models` it is for all models, and without `expires` it does
    not end. `limits` are those that it gave its tenant.
    """

    id: str
    name: str
    tenant: str
    ending: str
    models: tuple[str, ...] | None
    expires: datetime | None
    expired: bool
    created: datetime
    limits: TenantLimits | None


class NewKey(KeyAnswer, kw_only=True):
    """A key that was just issued. Only this answer tells the `key`. `notes`: what it changed for others."""

    key: str
    notes: list[str] = []


class RemovedKey(msgspec.Struct):
    """A key that was removed. `warning`: why that is not saved; null if it is."""

    id: str
    warning: str | None


class IssuedKeys:
    """Issues, lists and removes keys. A change counts before it is answered."""

    def __init__(
        self,
        book: KeyBook,
        file: KeyBookFile | None,
        tenants: Callable[[], Collection[str]],
        tell: Callable[[], Awaitable[object]],
    ) -> None:
        """`file`: None without a `state_dir`. `tenants`: those that the settings name. `tell` has the other
        workers look into the file."""
        self._book, self._file, self._tenants, self._tell = book, file, tenants, tell
        self._seen: tuple[int, int] | None = _NEVER
        self._is_wanted = asyncio.Event()
        self._has_complained = False
        book.listeners.append(self._is_wanted.set)

    def described(self) -> list[KeyAnswer]:
        """All keys that were not removed."""
        return [KeyAnswer(**_fields(key)) for key in self._book.issued()]

    async def add(
        self,
        *,
        tenant: str | None,
        name: str,
        models: tuple[str, ...] | None,
        expires: datetime | None,
        limits: TenantLimits = NO_LIMITS,
        new_tenant: bool = False,
    ) -> NewKey:
        """Issues a key. With `limits`, its tenant has these from now on; with `new_tenant`, nobody needs to
        know the tenant.

        Raises:
            NotFound: there is no such tenant.
            BadRequest: no tenant is named, the key would have ended, or the limits are the settings' affair.
            Conflict: there is no `state_dir`, or there are too many keys.
            ProxyError: it cannot be saved.
        """
        tenant = self._tenant(tenant, is_new=new_tenant)
        if limits != NO_LIMITS and tenant in self._tenants():
            raise BadRequest(f"the settings name tenant {tenant!r}: set its limits there", param="tenant")
        if expires is not None and expires.timestamp() <= time.time():
            raise BadRequest("expires is in the past", param="expires")
        if len(self._book.issued()) >= MAX_KEYS:
            raise Conflict(f"there are {MAX_KEYS} issued keys, the most that kvpin keeps: remove some")
        secret = f"{KEY_PREFIX}{secrets.token_urlsafe(_SECRET_BYTES)}"
        key = IssuedKey(
            f"key-{secrets.token_hex(_ID_BYTES)}",
            tenant,
            ApiKey.of(secret, tenant).digest,
            secret[-_ENDING:],
            time.time(),
            name,
            models,
            min(expires.timestamp(), _LAST) if expires is not None else None,
            limits=limits if limits != NO_LIMITS else None,
        )
        if self._file is None:
            raise Conflict("there is no place to keep keys: start kvpin with --state-dir, or set state_dir")
        if (why := await self._exchange(self._file, [key])) is not None:
            raise ProxyError(why)
        await self._tell()
        return NewKey(**_fields(key), key=secret)

    async def remove(self, key_id: str) -> RemovedKey:
        """Removes a key. It opens nothing from then on, here and in the group, also where that cannot be
        saved. Raises NotFound."""
        key = next((each for each in self._book.issued() if each.id == key_id), None)
        if key is None:
            raise NotFound(f"no key with the id {key_id!r} was issued, or it was removed", param="key_id")
        self._book.merge([self._book.removal(key, time.time())])
        if self._file is None:
            return RemovedKey(key_id, _SAVED_ELSEWHERE)
        if (why := await self._exchange(self._file)) is not None:
            return RemovedKey(key_id, _UNSAVED.format(why))
        await self._tell()
        return RemovedKey(key_id, None)

    async def run(self) -> None:
        """Follows the file, which other kvpins may change, and saves what they tell. Runs for ever."""
        while True:
            await self.look()
            await within(_LOOK_S, self._is_wanted.wait())

    async def look(self) -> None:
        """Takes over what is new in the file, and saves what it lacks."""
        file = self._file
        if file is None or (file.version == self._seen and not self._is_wanted.is_set()):
            return
        if file.version is None and not self._book.has_issued:
            return
        why = await self._exchange(file)
        if why is not None and not self._has_complained:
            log.error("issued keys are not saved: those that are known count; repair the file", error=why)
        elif why is None and self._has_complained:
            log.info("issued keys are saved again")
        self._has_complained = why is not None

    async def _exchange(self, file: KeyBookFile, added: Collection[IssuedKey] = ()) -> str | None:
        """Saves the book and what is added, and takes over what the file holds. Returns why that failed, else
        None: `look` tries again."""
        self._is_wanted.clear()
        seen, self._seen = file.version, _NEVER
        try:
            entries = await asyncio.to_thread(file.add, [*self._book.entries(), *added])
        except OSError as error:
            return f"the file of keys cannot be written: {error.strerror or error}"
        except SettingsError as error:
            return str(error)
        self._book.merge(entries)
        self._seen = seen  # if the file has changed, it is read once more
        return None

    def _tenant(self, tenant: str | None, *, is_new: bool) -> str:
        """The tenant of a new key: one of the settings or of an issued key, or a new one; where the settings
        have none, any."""
        if not self._tenants():
            return tenant or DEFAULT_TENANT
        known = {*self._tenants(), *(key.tenant for key in self._book.issued())}
        names = ", ".join(sorted(known))
        if tenant is None:
            raise BadRequest(f"tenant is missing; known: {names}", param="tenant")
        if tenant not in known and not is_new:
            why = f"there is no tenant {tenant!r}; known: {names}; new_tenant makes a new one"
            raise NotFound(why, param="tenant")
        return tenant


def _fields(key: IssuedKey) -> dict[str, Any]:
    expires = datetime.fromtimestamp(key.expires, UTC) if key.expires is not None else None
    return {
        **{name: getattr(key, name) for name in ("id", "name", "tenant", "ending", "models", "limits")},
        "expires": expires,
        "expired": key.expires is not None and key.expires <= time.time(),
        "created": datetime.fromtimestamp(key.created, UTC).replace(microsecond=0),
    }


def used_engines(fleet: Fleet) -> frozenset[str]:
    """The ids of the engines that are not refused because several tenants would share their KV."""
    return frozenset(each.id for each in fleet.engines.values() if each.state is not EngineState.REFUSED)


def notes_of(
    key: KeyAnswer, tenants: Tenants, fleet: Fleet, *, was_open: bool, used: frozenset[str]
) -> Iterator[str]:
    """A sentence for each change by a new key that may surprise. Before it was issued, requests needed no key
    if kvpin `was_open`, and these engines were `used`."""
    if was_open and not tenants.open:
        yield "this is the first key: from now on, every request needs one"
    if lost := [name for name in fleet.engines if name in used - used_engines(fleet)]:
        yield (
            f"not used any more, because several tenants would share their KV: {', '.join(lost)}; set "
            f"share_kv=true on them, or remove the key: kvpin keys remove {key.id}"
        )
    if any(each.is_served_there for each in fleet.engines.values()):
        return  # another kvpin knows what these serve
    for model in key.models or ():
        if not fleet.has_model(model):
            yield f"no engine serves {model!r} now"


# --- prompt tables, registered here and on every engine that holds tables, or nowhere -------------------


class TableAnswer(msgspec.Struct, kw_only=True):
    """A p-tuning table without its values. `extra_id` is the uint64 beside each of its fake token ids."""

    table_id: str
    extra_id: int
    rows: int
    hidden: int
    bytes: int


class SharedTables:
    """The registry's tables, kept the same on all engines."""

    def __init__(self, fleet: Fleet, tables: RegisteredTables, files: TableFiles | None = None) -> None:
        """`files`: where tables are kept over a restart, if anywhere."""
        self._fleet, self._tables, self._files = fleet, tables, files

    def described(self) -> list[TableAnswer]:
        """All tables."""
        return [describe_table(table) for table in self._tables.list()]

    async def put(
        self, data: bytes, *, table_id: str | None = None, extra_id: int | None = None
    ) -> TableAnswer:
        """Registers a table and gives it to every connected engine that holds tables.

        Raises:
            BadRequest, PromptTableError: bytes or ids that cannot be used, or that an engine refuses.
            Conflict: an id stands for other content.
            EngineUnavailable: an engine went away in between; nothing is registered.
        """
        read = partial(read_table, data, table_id, extra_id)
        ready = await off_loop(read, ms=len(data) / TABLE_BYTES_PER_MS)
        before = {table.table_id for table in self._tables.list()}
        table = self._tables.add(ready)
        try:
            for engine in self._holders():
                try:
                    await engine.adapter.put_prompt_table(table)
                except EngineRejected as error:
                    if not 400 <= error.status < 500:  # noqa: PLR2004 - HTTP
                        raise
                    refused = Conflict if error.status == HTTPStatus.CONFLICT else BadRequest
                    raise refused(f"engine {engine.id!r}: {error}", param=error.param or "table") from error
        except (EngineError, BadRequest, Conflict):
            if table.table_id not in before:
                await self.delete(table.table_id)
            raise
        if self._files is not None:
            await asyncio.to_thread(self._files.put, table)
        return describe_table(table)

    async def delete(self, table_id: str) -> None:
        """Forgets a table here and on the engines; raises NotFound."""
        table = self._tables.get(table_id)
        self._tables.delete(table_id)
        if self._files is not None:
            await asyncio.to_thread(self._files.delete, table)
        for engine in self._holders():
            try:
                await engine.adapter.delete_prompt_table(table_id)
            except EngineUnavailable as error:
                # The monitor checks it at once. If it restarted, its tables are gone anyway.
                engine.suspect(error)

    def _holders(self) -> list[Engine]:
        pools = list(self._fleet.pools.values())
        engines = [engine for pool in pools for engine in pool.engines.values()]
        return [engine for engine in engines if engine.can(Capability.PROMPT_TABLES)]


def describe_table(table: PromptTable) -> TableAnswer:
    """A table as the admin API tells it."""
    alike = {name: getattr(table, name) for name in ("table_id", "extra_id", "rows", "hidden")}
    return TableAnswer(**alike, bytes=len(table.data))
