"""NIXL's API, in which GPU memory is DRAM.

SGLang registers its memory as that of a GPU, whatever it runs on. And each agent has a thread that looks for
work without a pause: on a machine with few cores, engines would starve.
"""

from __future__ import annotations

from nixl_cu12 import _api as real
from nixl_cu12._api import *  # noqa: F403

nixl_agent_config = real.nixl_agent_config
PAUSE_US = 1000


class _Config(real.nixlBind.nixlAgentConfig):
    """An agent's settings, of which the API sets the pause itself."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, PAUSE_US if name == "pthrDelay" else value)


real.nixlBind.nixlAgentConfig = _Config


def _here(kind: str | None) -> str | None:
    return "DRAM" if kind == "VRAM" else kind


class nixl_agent(real.nixl_agent):  # noqa: N801 - NIXL's own name
    """An agent that knows no GPU."""

    def register_memory(self, reg_list: object, mem_type: str | None = None, backends: object = ()) -> object:
        """Registers memory, whatever kind SGLang says it is."""
        return super().register_memory(reg_list, _here(mem_type), list(backends))

    def get_xfer_descs(self, descs: object, mem_type: str | None = None) -> object:
        """Describes parts of it."""
        return super().get_xfer_descs(descs, _here(mem_type))

    def prep_xfer_dlist(
        self, agent_name: str, xfer_list: object, mem_type: str | None = None, backends: object = ()
    ) -> object:
        """Prepares to move them."""
        return super().prep_xfer_dlist(agent_name, xfer_list, _here(mem_type), list(backends))
