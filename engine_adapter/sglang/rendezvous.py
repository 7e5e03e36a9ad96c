"""How the two halves of an SGLang (`--disaggregation-mode`) meet for a request.

Both get the request with the address of the prefill server's bootstrap server, and with a room there, which
no other request has. The decode server reads the KV, and with it the first token, from the room. A decode
server whose room no prefill server enters waits until its client leaves, and answers nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

from typing_extensions import override

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected
from engine_adapter.sglang.requests import CHAT, COMPLETIONS
from engine_adapter.sglang.routes import GENERATE
from engine_adapter.sglang.server_info import ServerInfo
from engine_adapter.transfer import Rendezvous
from engine_adapter.types import EngineSpec, Role

ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
# Rooms are positive int64. Of several data-parallel ranks, a room's remainder is the one that serves it.
_ROOMS = 2**62


class BootstrapRoom(Rendezvous):
    """`Rendezvous` in a room of a prefill server's bootstrap server."""

    remedy = (
        "add an SGLang server of the model with the other --disaggregation-mode and the same "
        "--disaggregation-transfer-backend"
    )

    def __init__(self, backend: str, host: str, port: int, rank: int, ranks: int) -> None:
        """`backend`: by which KV is moved. `host` and `port`: of the bootstrap server. `rank`: of the `ranks`
        data-parallel ones, the one that requests go to."""
        self.name = f"SGLang's bootstrap rooms, {backend}"
        self._place = {"bootstrap_host": host, "bootstrap_port": port}
        self._rank, self._ranks = rank, ranks

    @override
    def takes(self, route: str) -> bool:
        return route in (CHAT, COMPLETIONS, GENERATE)

    @override
    def meet(self) -> Mapping[str, object]:
        room = (1 + secrets.randbelow(_ROOMS // self._ranks)) * self._ranks + self._rank
        return {**self._place, "bootstrap_room": room}


def rendezvous_of(info: ServerInfo, spec: EngineSpec) -> Rendezvous | None:
    """How a server meets its other half; None if it is whole. The bootstrap server has the host at which
    kvpin reaches the server."""
    if not info.is_half:
        return None
    host, rank = urlsplit(spec.url).hostname or "", spec.options.rank
    of_rank = (0, 1) if rank is None else (rank, info.dp_ranks)
    return BootstrapRoom(info.transfer_backend, host, info.bootstrap_port, *of_rank)


def check_is_one(info: ServerInfo, path: str, body: JsonBody) -> None:
    """Raises EngineRejected for a request with several answers in one room: the decode server would never
    answer it. kvpin splits those of `/v1`."""
    if not info.is_half or path != GENERATE:
        return
    sampling = body.get("sampling_params")
    several = [name for name in ("text", "input_ids") if body.items(name) is not None]
    if isinstance(sampling, list) or (isinstance(sampling, dict) and sampling.get("n") not in (None, 1)):
        several.append("sampling_params")
    if several:
        raise EngineRejected(
            f"{several[0]} asks for several answers, and a pair of SGLang servers gives one at a time on "
            f"{GENERATE}: send a request for each, or use {COMPLETIONS}",
            status=400,
            param=several[0],
        )
