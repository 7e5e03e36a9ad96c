"""Answers of LMCache's node (its multi-process server) and coordinator: the fields that kvpin reads."""

from __future__ import annotations

import msgspec


class Key(msgspec.Struct, frozen=True):
    """The name of one object: a chunk of one rank's KV."""

    chunk_hash_hex: str
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""


class Placement(msgspec.Struct, frozen=True):
    """One place of an object. `tier` is l1 or l2; `shared` backends belong to every node."""

    instance_id: str
    tier: str
    size_bytes: int = 0
    shared: bool = False


class KeyPlacements(msgspec.Struct, frozen=True):
    """One object and all its places."""

    key: Key
    placements: list[Placement]


class Lookup(msgspec.Struct, frozen=True):
    """Coordinator, `POST /directory/lookup`: whole chunks of a prompt, and their objects in order."""

    chunks: int
    results: list[KeyPlacements]


class Listing(msgspec.Struct, frozen=True):
    """Coordinator, `GET /directory/keys`: one page of all known objects."""

    total: int
    keys: list[KeyPlacements]


class DirectoryStats(msgspec.Struct, frozen=True):
    """Coordinator, `GET /directory/stats`."""

    l1_keys_by_instance: dict[str, int]
    l1_count: int
    l1_size_bytes: int
    l2_count: int
    l2_size_bytes: int


class Instance(msgspec.Struct, frozen=True):
    """A node registered with the coordinator."""

    instance_id: str


class Instances(msgspec.Struct, frozen=True):
    """Coordinator, `GET /instances`."""

    instances: list[Instance]


class PinAnswer(msgspec.Struct, frozen=True):
    """Coordinator, `POST` and `DELETE /cache/pins`."""

    requested: int
    affected: int


class Pins(msgspec.Struct, frozen=True):
    """Coordinator, `GET /cache/pins`."""

    total: int


class Context(msgspec.Struct, frozen=True):
    """An engine connected to a node."""

    model_name: str
    world_size: int


class L1(msgspec.Struct, frozen=True):
    """A node's memory."""

    total_object_count: int = 0
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0


class Storing(msgspec.Struct, frozen=True):
    """Objects on their way from L1 to L2."""

    pending_keys_count: int = 0
    in_flight_task_count: int = 0


class Storage(msgspec.Struct, frozen=True):
    """A node's tiers. A node with several memories counts each under its own name."""

    l1_managers: dict[str, L1] = {}
    store_controllers: dict[str, Storing] = {}
    num_l2_adapters: int = 0

    @property
    def l1_objects(self) -> int:
        """Objects in memory."""
        return sum(l1.total_object_count for l1 in self.l1_managers.values())

    @property
    def is_storing(self) -> bool:
        """Whether any object is on its way to L2."""
        return any(s.pending_keys_count or s.in_flight_task_count for s in self.store_controllers.values())


class Status(msgspec.Struct, frozen=True):
    """Node, `GET /status`. It lists engines on GPUs and on CPUs separately."""

    chunk_size: int
    storage_manager: Storage
    cache_context_meta: dict[str, Context] = {}
    non_cuda_context_meta: dict[str, Context] = {}


class ServerConfig(msgspec.Struct, frozen=True):
    """The server's part of a node's configuration."""

    instance_id: str


class CoordinatorConfig(msgspec.Struct, frozen=True):
    """The coordinator's part of a node's configuration."""

    url: str | None = None
    event_reporting: bool = False
    event_flush_interval: float = 1.0


class Config(msgspec.Struct, frozen=True):
    """Node, `GET /config`."""

    mp: ServerConfig
    coordinator: CoordinatorConfig | None = None


class Prefetch(msgspec.Struct, frozen=True):
    """Node, `POST /cache/prefetches` and `GET /cache/prefetches/{id}`: status is noop, submitted, pending or
    completed."""

    status: str
    request_id: str = ""
    found_keys: int = 0
    total_keys: int = 0


class Deleted(msgspec.Struct, frozen=True):
    """Node, `DELETE /cache/objects`: a request uses the `skipped` objects."""

    deleted: int
    skipped: int = 0
    ok: bool = True
    error: str = ""
