"""The collaborators of the control plane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine_adapter import EngineAdapter, EngineSpec
from proxy.control.operations import Operations
from proxy.core.pins import PinBook
from proxy.fleet.fleet import Fleet
from proxy.fleet.monitor import Monitor
from proxy.flow import Flow
from proxy.prompt import PromptTables
from proxy.request.records import RequestLog
from proxy.request.tenants import Tenants
from proxy.tasks import Supervisor


@dataclass(frozen=True, slots=True)
class Control:
    """Everything the control plane works on.

    Attributes:
        fleet: the engines.
        flow: the read path; its forwarder warms, its ingest rebuilds views.
        monitor: looks after engines that are added.
        tables: registered prompt tables.
        tenants: tenant → cache salt.
        requests: the last requests.
        pins: what operators asked to keep.
        tasks: runs operations.
        make_adapter: engine description → adapter.
        clock: monotonic seconds.
        max_body_bytes: longest admin request body.
        operations: running and recent operations.
    """

    fleet: Fleet
    flow: Flow
    monitor: Monitor
    tables: PromptTables
    tenants: Tenants
    requests: RequestLog
    pins: PinBook
    tasks: Supervisor
    make_adapter: Callable[[EngineSpec], EngineAdapter]
    clock: Callable[[], float]
    max_body_bytes: int = 512 * 2**20
    operations: Operations = field(default_factory=Operations)
