"""The settings and engines of the worlds in which versions are compared."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from tests.compare.cases import ADMIN
from tests.fake_engines.sglang import running_sglang
from tests.fake_engines.text import MODEL_DIR
from tests.fake_engines.vllm import running_vllm

_COMMON = """
name = "compared"
[logs]
format = "json"
level = "debug"
[health]
interval_s = 1
timeout_s = 60
[timeouts]
first_byte_s = 3
idle_s = 0.8
total_s = 60
"""
_WITH_KEYS = f"""
reuse = true
admin_key = "{ADMIN}"
tenant_metrics = 8
model_aliases = {{ alias = "tiny" }}
cors_origins = ["https://chat.example"]
api_keys = [
  {{ key = "key-one", tenant = "one" }},
  {{ key = "key-two", tenant = "two" }},
  {{ key = "key-few", tenant = "few", requests_per_minute = 2, concurrent_requests = 1 }},
  {{ key = "key-tokens", tenant = "tokens", tokens_per_minute = 60 }},
  {{ key = "key-plain", tenant = "of-plain", models = ["plain"] }},
  {{ key = "key-old", tenant = "old", expires = "2026-12-31T00:00:00Z" }},
]
{_COMMON}
[limits]
json_values = 20000
body_bytes = "1MiB"
request_records = 4000
[[normalise]]
rules = ["billing_line", "date_to_day", "tools_sorted", "schemas_sorted"]
model = "plain"
"""
_OPEN = f"""
reuse = false
default_model = "tiny"
{_COMMON}
"""


@dataclass(frozen=True, slots=True)
class Engine:
    """A fake, which takes `options`, and kvpin's settings of it."""

    name: str
    kind: str
    options: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)

    def start(self) -> AbstractContextManager[Any]:
        """The running fake."""
        return (running_sglang if self.kind == "sglang" else running_vllm)(**self.options)


_PLAIN = {"model": "plain", "kv_events": False, "enable_scale_out": False}
_OF_PLAIN = {"model": "plain", "share_kv": True, "tokenizer": str(MODEL_DIR)}
_V0, _V1 = (Engine(name, "vllm", {"model": "tiny"}) for name in ("v0", "v1"))
_W = Engine("w", "vllm", {"model": "solo", "loras": ("lora",)})
_SG = Engine("sg", "sglang", {"model": "sg"})
_P0, _P1 = (Engine(name, "openai_compatible", _PLAIN, _OF_PLAIN) for name in ("p0", "p1"))


@dataclass(frozen=True, slots=True)
class Setup:
    """What makes a world: the settings of its kvpin, and engines."""

    settings: str
    engines: tuple[Engine, ...]

    @property
    def follows_events(self) -> bool:
        """True if kvpin reads the engines' KV events."""
        return "reuse = true" in self.settings

    def toml(self, ports: dict[str, int]) -> str:
        """kvpin's settings, with the ports of its engines."""
        lines = [self.settings]
        for each in self.engines:
            place = {"id": each.name, "kind": each.kind, "url": f"http://127.0.0.1:{ports[each.name]}"}
            fields = (place | each.settings).items()
            lines += ["[[engines]]", *(f"{name} = {json.dumps(value)}" for name, value in fields)]
        return "\n".join(lines)


SETUPS = {
    "keys": Setup(_WITH_KEYS, (_V0, _V1, _W, _SG, _P0, _P1)),
    "open": Setup(_OPEN, (_V0, _V1, _P0, _SG)),
}
