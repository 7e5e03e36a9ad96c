"""The settings and engines of the worlds in which versions are compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tests.compare.messages import ADMIN
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
_KEYS: tuple[dict[str, object], ...] = (
    {"key": "key-one", "tenant": "one"},
    {"key": "key-two", "tenant": "two"},
    {"key": "key-few", "tenant": "few", "requests_per_minute": 2, "concurrent_requests": 1},
    {"key": "key-tokens", "tenant": "tokens", "tokens_per_minute": 60},
    {"key": "key-plain", "tenant": "of-plain", "models": ["plain"]},
    {"key": "key-old", "tenant": "old", "expires": "2026-12-31T00:00:00Z"},
)


@dataclass(frozen=True, slots=True)
class Engine:
    """A fake and kvpin's settings of it.

    Attributes:
        start: the fake, which takes `options`.
    """

    name: str
    kind: str
    start: Callable[..., AbstractContextManager[Any]]
    options: dict[str, Any]
    settings: dict[str, Any]


def _vllm(name: str, model: str, **options: object) -> Engine:
    return Engine(name, "vllm", running_vllm, {"model": model, **options}, {})


def _plain(name: str) -> Engine:
    options = {"model": "plain", "kv_events": False, "enable_scale_out": False}
    settings = {"model": "plain", "share_kv": True, "tokenizer": str(MODEL_DIR)}
    return Engine(name, "openai_compatible", running_vllm, options, settings)


@dataclass(frozen=True, slots=True)
class Setup:
    """What makes a world: the main settings of its kvpin, keys and engines."""

    settings: str
    keys: tuple[dict[str, object], ...]
    engines: tuple[Engine, ...]

    @property
    def follows_events(self) -> bool:
        """True if kvpin reads the engines' KV events."""
        return "reuse = true" in self.settings

    def toml(self, ports: dict[str, int]) -> str:
        """kvpin's settings, with the ports of its engines."""
        tables = [("api_keys", key) for key in self.keys]
        for engine in self.engines:
            url = f"http://127.0.0.1:{ports[engine.name]}"
            tables.append(
                ("engines", {"id": engine.name, "kind": engine.kind, "url": url, **engine.settings})
            )
        lines = [self.settings]
        for name, fields in tables:
            lines += [f"[[{name}]]", *(f"{key} = {json.dumps(value)}" for key, value in fields.items())]
        return "\n".join(lines)


SETUPS = {
    "keys": Setup(
        _WITH_KEYS,
        _KEYS,
        (
            _vllm("v0", "tiny"),
            _vllm("v1", "tiny"),
            _vllm("w", "solo", loras=("lora",)),
            Engine("sg", "sglang", running_sglang, {"model": "sg"}, {}),
            _plain("p0"),
            _plain("p1"),
        ),
    ),
    "open": Setup(
        _OPEN,
        (),
        (
            _vllm("v0", "tiny"),
            _vllm("v1", "tiny"),
            _plain("p0"),
            Engine("sg", "sglang", running_sglang, {"model": "sg"}, {}),
        ),
    ),
}
