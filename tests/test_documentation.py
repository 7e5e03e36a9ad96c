"""What operators and clients can meet is documented: settings, metrics, error codes, headers."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from engine_adapter import ENGINE_OPTIONS
from engine_adapter.torch_engine.engine import Counters
from engine_adapter.torch_engine.metrics import EngineMetrics
from engine_adapter.types import EngineSpec
from proxy.api.errors import TABLE
from proxy.core.placement import demand, load, rates
from proxy.fleet.fleet import Fleet
from proxy.observe.metrics import Metrics
from proxy.observe.reasons import Reason
from proxy.settings import Settings

ROOT = Path(__file__).parent.parent
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
PLACEMENT = (ROOT / "docs" / "placement.md").read_text(encoding="utf-8")
EMBEDDED = (ROOT / "docs" / "engines" / "embedded.md").read_text(encoding="utf-8")
SOURCES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "proxy").rglob("*.py")}


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings; `[]` marks a list."""
    for name, field in model.model_fields.items():
        types = (field.annotation, *get_args(field.annotation))
        part = next((t for t in types if isinstance(t, type) and issubclass(t, BaseModel)), None)
        if part is None:
            yield prefix + name
        else:
            yield from settings_of(part, f"{prefix}{name}{'' if part is field.annotation else '[]'}.")


def metrics_of(registry) -> set[str]:
    counters = {f"{m.name}_total" for m in registry.collect() if m.type == "counter"}
    return counters | {m.name for m in registry.collect() if m.type != "counter"}


def table(title: str) -> str:
    """A section of the reference."""
    return OPERATIONS.partition(f"### {title}")[2].partition("###")[0]


def options_of_kinds() -> Iterator[str]:
    """Dotted names of the settings that only engines of some kinds have."""
    for name in dict.fromkeys(name for names in ENGINE_OPTIONS.values() for name in names):
        yield from (f"engines[].{name}", f"managed[].{name}")


@pytest.mark.parametrize("name", [*settings_of(Settings), *options_of_kinds()])
def test_every_setting(name):
    assert f"`{name}`" in table("Settings")


@pytest.mark.parametrize("name", [*settings_of(Settings)])
def test_every_setting_is_read(name):
    leaf = name.rpartition(".")[2]
    read = [path for path, text in SOURCES.items() if re.search(rf"\.{leaf}\b", text)]
    assert read or leaf in EngineSpec.__slots__


def test_no_setting_that_is_gone():
    documented = re.findall(
        r"`([a-z_\[\].]+)`", "".join(re.findall(r"^\| (`.*?) \|", table("Settings"), re.MULTILINE))
    )
    assert set(documented) == {*settings_of(Settings), *options_of_kinds()}


@pytest.mark.parametrize("name", sorted(metrics_of(Metrics(Fleet()).registry)))
def test_every_metric(name):
    assert f"`{name}`" in table("Metrics")


def test_every_metric_of_the_embedded_engine():
    metrics = EngineMetrics()
    text = metrics.render(Counters(), {"pinned_blocks": 0}).decode()
    names = {
        name for name in re.findall(r"^# TYPE (\w+)", text, re.MULTILINE) if not name.endswith("_created")
    }
    assert len(names) > 10
    for name in names:
        assert f"`{name}`" in EMBEDDED


def test_every_error_code():
    literal = {code for text in SOURCES.values() for code in re.findall(r'\bcode="(\w+)"', text)}
    codes = literal | {row.code for row in TABLE.values() if row.code is not None}
    documented = set(re.findall(r"^\| `(\w+)` \|", table("Error codes"), re.MULTILINE))
    assert documented == codes


def test_every_response_header():
    set_by = ("flow.py", "forward.py", "errors.py")
    found = {
        name
        for path, text in SOURCES.items()
        if path.name in set_by
        for name in re.findall(r'"(x-kvpin-[a-z-]+|x-should-retry|retry-after|www-authenticate)"', text)
    }
    assert len(found) == 7
    for name in (*found, "x-request-id"):
        assert f"| `{name}` |" in table("Response headers")


@pytest.mark.parametrize("reason", [*Reason])
def test_every_reason_of_a_placement(reason):
    assert f"| `{reason}` |" in PLACEMENT
    assert f"`{reason}` (" in table("Metrics")


@pytest.mark.parametrize(
    "said",
    [
        f"the last {rates.WINDOW} samples",
        f"the last {4 * rates.WINDOW} samples",
        f"{rates.DEFAULT_PREFILL_TOK_S:,.0f} tokens a second",
        f"{rates.OWN_PACE} times faster",
        f"{demand.MIN_UTILISATION:.0%} at least",
        f"{demand.MAX_UTILISATION:.0%} at most",
        f"as streams for {load.REPORT_S:.0f} s",
    ],
)
def test_constants_of_placement(said):
    assert said in " ".join(PLACEMENT.split())


@pytest.mark.parametrize("page", ["architecture.md", "add-an-engine.md"])
def test_every_path_named_is_there(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    paths = re.findall(r"`((?:proxy|engine_adapter|tests|scripts|docs)/[\w./-]+)`", text)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []
