"""What operators and clients can meet is documented, and what the documents quote is what kvpin prints."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from engine_adapter.prompt.forms import Form
from engine_adapter.torch_engine.engine import Counters
from engine_adapter.torch_engine.service import EngineMetrics
from engine_adapter.types import EngineSpec
from proxy.cli.engine_check import _findings_of, show_examination
from proxy.cli.engine_probe import View
from proxy.core.misses import Miss
from proxy.core.reasons import Reason
from proxy.fleet.fleet import Fleet
from proxy.observe.metrics import Metrics
from proxy.settings import Settings, check_settings
from proxy.settings.schema import LimitSettings
from scripts.reference.gate import LIMITS

ROOT = Path(__file__).parent.parent
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
PLACEMENT = (ROOT / "docs" / "placement.md").read_text(encoding="utf-8")
EMBEDDED = (ROOT / "docs" / "engines" / "embedded.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
}
SOURCES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "proxy").rglob("*.py")}


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted names of all settings; `[]` marks a list."""
    for name, field in model.model_fields.items():
        types = (field.annotation, *get_args(field.annotation))
        part = next((t for t in types if isinstance(t, type) and issubclass(t, BaseModel)), None)
        if part is None:
            yield prefix + name
        else:
            is_one = part is field.annotation or type(None) in types
            yield from settings_of(part, f"{prefix}{name}{'' if is_one else '[]'}.")


@pytest.mark.parametrize("name", [*settings_of(Settings)])
def test_every_setting_is_read(name):
    leaf = name.rpartition(".")[2]
    read = [path for path, text in SOURCES.items() if re.search(rf"\.{leaf}\b", text)]
    assert read or leaf in EngineSpec.__slots__


@pytest.mark.parametrize("miss", list(Miss))
def test_every_way_to_miss(miss):
    assert f"\n| `{miss}` |" in PAGES["docs/misses.md"]


def test_every_metric_of_the_embedded_engine():
    metrics = EngineMetrics()
    text = metrics.render(Counters(), {"pinned_blocks": 0}).decode()
    names = {
        name for name in re.findall(r"^# TYPE (\w+)", text, re.MULTILINE) if not name.endswith("_created")
    }
    assert len(names) > 10
    for name in names:
        assert f"`{name}`" in EMBEDDED


def test_no_error_has_a_code_that_is_not_declared():
    found = [path for path, text in SOURCES.items() if re.search(r'\bcode="', text)]
    assert found == []


@pytest.mark.parametrize("reason", [*Reason])
def test_every_reason_of_a_placement(reason):
    assert f"| `{reason}` |" in PLACEMENT
    assert f" {reason} (" in PAGES["docs/reference/metrics.md"]


def blocks(text: str) -> list[str]:
    """The fenced blocks of a page."""
    return re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def example(name: str):
    """A program of examples/, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_output_of_the_demo_is_what_it_prints(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    demo = example("ttft_demo")
    (quoted,) = [block for block in blocks(README) if block.startswith("first question")]
    *lines, last = quoted.splitlines()
    for line in lines:
        ms, cached, tokens, between = map(float, re.findall(r"[\d.]+", line))
        timing = demo.Timing(ms / 1000, between / 1000, int(tokens), int(cached))
        assert line == demo.line(line[:16].rstrip(), timing)
    assert last == demo.verdict(float(re.search(r"([\d.]+)x", last)[1]))


def test_the_output_of_doctor_is_what_it_prints(capsys):
    view, asked = View("late", "no view within 10 s: no event came"), (Form.DOCUMENTS, Form.OTHER)
    found = {
        "kind": "vllm", "version": "0.32.0", "detected": True, "role": "both", "model": "qwen3", "models": {},
        "loras": ["ada"], "max_model_len": 32768, "tokens_per_block": 16, "gpu_blocks": 28163,
        "host_blocks": None,
        "running": 0, "waiting": 0, "can": ["cache_salt", "cached_tokens", "kv_events", "tokenize"],
        "cannot": {"offload": "connect an LMCache server"}, "view": {"detail": view.detail},
        "tokenisation": {
            "detail": "tokenised here with 'Qwen/Qwen3-8B', as the engine does in 10 forms of prompts",
            "forms": {form: {"source": "engine" if form in asked else "local"} for form in Form},
        },
        "probe": {"error": None, "reported": 48, "n_tokens": 49, "predicted": 0},
        "findings": [{"problem": f.problem, "remedy": f.remedy} for f in _findings_of(None, view, None)],
        "unseen": None,
    }  # fmt: skip
    show_examination(found)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    (quoted,) = [block for block in blocks(OPERATIONS) if block.startswith("$ kvpin doctor")]
    assert quoted.splitlines()[1:] == printed


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if "\n```toml" in text])
def test_settings_can_be_used(page, tmp_path):
    for number, text in enumerate(re.findall(r"^```toml\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)):
        path = tmp_path / f"{number}.toml"
        path.write_text(text.replace('"…"', '"a key"'), encoding="utf-8")
        assert check_settings(path)[1] == [], text


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    home = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            linked = (home / path).resolve() if path else ROOT / page
            assert linked.exists(), target
            if anchor:
                titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
                slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
                assert anchor in slugs, target


def test_every_attack_has_its_test():
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    tests = {
        (path.name, name) for path in paths for name in re.findall(r"(?:def|class) (\w+)", path.read_text())
    }
    tests |= {(path.name, "") for path in paths}
    named = re.findall(r"(test_\w+\.py)(?:::(?:\w+::)*(\w+))?", PAGES["docs/threat-model.md"])
    assert len(named) > 40
    assert set(named) <= tests


@pytest.mark.parametrize("page", ["architecture.md", "add-an-engine.md"])
def test_every_path_named_is_there(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    paths = re.findall(r"`((?:proxy|engine_adapter|tests|scripts|docs)/[\w./-]+)`", text)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_table_has_a_head(page):
    """Rows behind a paragraph are no table: they are shown as text."""
    text = re.sub(r"^```.*?^```", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert re.match(r"\|.*\n\|[ |:-]+\|\n", table), table


def test_every_setting_of_limits_is_in_the_table_of_the_gate():
    named = {each.setting.removeprefix("limits.") for each in LIMITS if each.setting.startswith("limits.")}
    elsewhere = {"request_records", "prompt_table_bytes"}  # memory that requests do not take on their way in
    assert named == LimitSettings.model_fields.keys() - elsewhere


def test_the_gates_reasons_are_those_of_the_metric():
    (refused,) = (each for each in Metrics(Fleet()).declared if each.name == "kvpin_refused_total")
    assert all(f" {each.reason} (" in refused.text for each in LIMITS if each.reason)
