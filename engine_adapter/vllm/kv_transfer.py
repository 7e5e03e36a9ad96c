"""How a vLLM was started to pass KV on, as it says itself in dev mode, and what follows.

`GET /server_info` has its `--kv-transfer-config`. Servers say nothing outside dev mode: then the operator's
settings are all that is known.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from engine_adapter.errors import EngineError
from engine_adapter.http.control import ControlClient
from engine_adapter.transfer import Transfer
from engine_adapter.types import Finding, Role
from engine_adapter.vllm.nixl import MARGIN_S, NixlPull
from engine_adapter.vllm.options import VllmSpec

_CONNECTOR = "NixlConnector"
_ITS_NAMES = (_CONNECTOR, "NixlPullConnector")
# These move KV between engines, too, but not as kvpin asks for it.
_OTHERS = ("MoRIIOConnector", "MooncakeConnector", "NixlPushConnector")
# These keep KV of their own engine below its GPU.
_OFFLOADING = ("OffloadingConnector", "SimpleCPUOffloadConnector")
# The first time, a server looks its machine over: that took 4.6 s.
_ANSWER_S = 20.0
_MAY_CONTAIN_IT = "MultiConnector"
_ROLES = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE}


class KvTransfer(msgspec.Struct, frozen=True):
    """The server's `--kv-transfer-config`.

    Attributes:
        kv_connector: None if it passes no KV on.
        kv_load_failure_policy: "recompute", or "fail": an answer without its KV is an error.
    """

    kv_connector: str | None = None
    kv_role: str | None = None
    kv_load_failure_policy: str | None = None
    kv_connector_extra_config: dict[str, object] = {}

    @property
    def moves_kv(self) -> bool:
        """True if others can pull its KV, and it can pull theirs."""
        return self.kv_connector in (*_ITS_NAMES, _MAY_CONTAIN_IT)

    @property
    def offloads(self) -> bool:
        """True if it keeps KV below the GPU by itself, and may do so."""
        return self.kv_connector in (*_OFFLOADING, _MAY_CONTAIN_IT)

    @property
    def describes_chunks(self) -> bool:
        """True if its events say which blocks it offloads."""
        return self.kv_connector_extra_config.get("self_describing_kv_events") is True

    def blocks_per_chunk(self, block_size: int | None) -> int:
        """Blocks that it offloads together; `block_size` is that of its GPU."""
        if self.kv_connector != "OffloadingConnector":
            return 1
        match self.kv_connector_extra_config:
            case {"blocks_per_chunk": int(blocks)}:
                return blocks
            case {"block_size": int(tokens)} if block_size:
                return tokens // block_size
            case _:
                return 1

    @property
    def role(self) -> Role:
        """The part of requests that it was started for."""
        return _ROLES.get(self.kv_role or "", Role.BOTH)

    @property
    def lease_s(self) -> float:
        """Seconds for which it keeps KV for others."""
        lease_s = self.kv_connector_extra_config.get("kv_lease_duration")
        return lease_s if isinstance(lease_s, int | float) else 30.0


class _Config(msgspec.Struct, frozen=True):
    kv_transfer_config: KvTransfer | None = None


class _ServerInfo(msgspec.Struct, frozen=True):
    vllm_config: _Config


async def ask(control: ControlClient) -> KvTransfer | None:
    """What the server says of it; None if it does not say, or says it as older ones do."""
    try:
        told = await control.read(_ServerInfo, "GET", "/server_info?config_format=json", answer_s=_ANSWER_S)
    except EngineError:
        return None
    return told.vllm_config.kv_transfer_config or KvTransfer()


def role_of(spec: VllmSpec, told: KvTransfer | None) -> Role:
    """The part of requests that it is meant for: as its settings say, else as it says itself."""
    return told.role if spec.role is Role.BOTH and told is not None else spec.role


def is_meant_to(spec: VllmSpec, told: KvTransfer | None) -> bool:
    """True if it is to pass KV on: it has a role, or its connector is known and passes KV both ways."""
    if spec.options.lmcache is not None:  # that one has its own connector
        return False
    is_known = spec.options.kv_transfer is not None or (told is not None and told.kv_connector in _ITS_NAMES)
    return is_known or role_of(spec, told) is not Role.BOTH


def transfer_of(spec: VllmSpec, told: KvTransfer | None) -> Transfer | None:
    """How it moves KV; None if it is not meant to, or cannot. Of the operator's lease and its own, the
    shorter one holds."""
    if not is_meant_to(spec, told):
        return None
    lease_s = spec.options.kv_lease_s if told is None else min(spec.options.kv_lease_s, told.lease_s)
    can = (told is None or told.moves_kv) and lease_s > MARGIN_S
    return NixlPull(lease_s) if can else None


def findings_of_transfer(spec: VllmSpec, told: KvTransfer | None) -> Iterator[Finding]:
    """What keeps an engine that is meant to pass KV on from doing so."""
    role = role_of(spec, told)
    if told is not None and told.kv_connector in _OTHERS:
        yield Finding(
            f"it has a {told.kv_connector}, and kvpin moves KV by {_CONNECTOR} alone: it is in no pair",
            NixlPull.remedy,
        )
        return
    if told is None or not is_meant_to(spec, told):
        return
    if not told.moves_kv:
        meant = "kv_transfer=nixl" if role is Role.BOTH else f"role={role}"
        yield Finding(f"it has {meant} and no {_CONNECTOR}: it is in no pair", NixlPull.remedy)
        return
    if told.lease_s <= MARGIN_S:
        yield Finding(
            f"it keeps KV for others for {told.lease_s:g} s: too short to be used, so it is in no pair",
            f'raise "kv_lease_duration" in --kv-transfer-config above {MARGIN_S:g}',
        )
    if role is not Role.PREFILL and told.kv_load_failure_policy == "fail":
        yield Finding(
            "an answer is an error if it cannot fetch the KV of its prompt",
            'add "kv_load_failure_policy":"recompute" to its --kv-transfer-config',
        )
