import asyncio
import io
import json
import logging
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import structlog

from engine_adapter import ModelState
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.observe import logs
from proxy.observe.logs import Banner, waiting_bar
from proxy.request.tenants import ApiKey, Tenants
from proxy.settings import LogSettings, Settings
from tests.fakes import INFO, FakeAdapter, add_ready
from tests.golden import check_golden


@pytest.fixture(autouse=True)
def restored():
    """Logging is the process's: leave it as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def configured(stream=None, **settings):
    stream = stream if stream is not None else io.StringIO()
    logs.configure_logs(LogSettings(**settings), stream)
    return stream


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_lines_go_to_what_is_standard_error_at_that_moment(monkeypatch):
    """Where a bar stands on the terminal, it takes standard error's place."""
    logs.configure_logs(LogSettings())
    later = io.StringIO()
    monkeypatch.setattr(sys, "stderr", later)
    structlog.get_logger("test").info("engine is ready")
    assert lines(later)[0]["event"] == "engine is ready"


def test_json_lines_off_a_terminal():
    stream = configured()
    structlog.get_logger("test").info("engine is ready", engine="a", tokens=5)
    (line,) = lines(stream)
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "engine is ready", "level": "info", "engine": "a", "tokens": 5}


def test_what_is_too_long_for_a_line_is_cut():
    stream = configured()
    structlog.get_logger("test").info("engine failed", error="e" * 1_000_000, tokens=5)
    (line,) = lines(stream)
    assert line["error"] == "e" * 4000 + "… (1000000 characters)"
    assert line["tokens"] == 5


def test_what_was_sent_does_not_control_the_terminal():
    stream = configured(Terminal())
    structlog.get_logger().warning(
        "a \x1b]0;title\x07 b", error="\x1b[2J", model="ä\x9b1m", lines="one\n\ttwo"
    )
    written = stream.getvalue()
    assert "\\x1b]0;title\\x07" in written
    assert "\x1b[2J" not in written
    assert not {"\x07", "\x9b"} & set(written)
    assert "ä" in written


def test_the_level_holds_for_us_and_for_libraries():
    stream = configured(level="warning")
    for log in (structlog.get_logger("test"), logging.getLogger("library")):
        log.info("too quiet")
        log.warning("loud enough")
    assert [line["event"] for line in lines(stream)] == ["loud enough", "loud enough"]


def test_context_stands_on_every_line_of_its_block():
    stream = configured()
    log = structlog.get_logger("test")
    with structlog.contextvars.bound_contextvars(request="req-1"):
        log.info("inside")
        logging.getLogger("library").warning("inside too")
    log.info("outside")
    assert [line.get("request") for line in lines(stream)] == ["req-1", "req-1", None]


@pytest.mark.parametrize("name", ["api_key", "authorization", "messages", "prompt", "token_ids", "headers"])
def test_fields_that_hold_secrets_or_prompts_are_hidden(name):
    stream = configured()
    structlog.get_logger("test").info("x", **{name: "hush"})
    assert "hush" not in stream.getvalue()
    assert lines(stream)[0][name] == "[hidden]"


PROMPT = "hush"  # tracebacks show lines of code: the text must not stand in them


def crash(prompt):
    raise ValueError(f"{len(prompt)} is wrong")


@pytest.mark.parametrize("form", ["json", "pretty"])
def test_tracebacks_do_not_show_local_variables(form):
    stream = configured(format=form)
    try:
        crash(prompt=PROMPT)
    except ValueError:
        structlog.get_logger("test").exception("crashed")
        logging.getLogger("library").exception("crashed too")
    assert stream.getvalue().count("4 is wrong") >= 2
    assert "hush" not in stream.getvalue()


def ready_fleet():
    fleet = Fleet()
    add_ready(fleet, "a")
    return fleet


def banner_of(fleet, *keys, **more):
    return Banner(fleet, "127.0.0.1", 8000, Settings(reuse=True), tenants=Tenants(keys), **more)


class Failed(FakeAdapter):
    model_state = ModelState.FAILED


def failed_fleet():
    """A model that failed to load, and one that did not."""
    fleet = Fleet()
    for name, kind in (("broken", Failed), ("good", FakeAdapter)):
        engine = fleet.add(kind(name, info=replace(INFO, model=name)))
        fleet.join(engine, engine.adapter.info)
        engine.state = EngineState.READY
    failed = fleet.engine("broken")
    failed.state, failed.last_error = EngineState.SUSPECT, "its model failed to load"
    return fleet


def drained_fleet():
    fleet = fleet_of(EngineState.READY, EngineState.READY)
    fleet.engine("e1").state = EngineState.DRAINING
    return fleet


def unserved_fleet():
    fleet = ready_fleet()
    fleet.aliases, fleet.default_model = {"gpt": "m", "lost": "gone"}, "nothere"
    return fleet


def keyed_banner(*models):
    """The banner where each key is for some models, or for all."""
    fleet = ready_fleet()
    add_ready(fleet, "b", model="n")
    fleet.aliases = {"alias": "m"}
    keys = [ApiKey.of(f"k{at}", "t", frozenset(each) if each else None) for at, each in enumerate(models)]
    return banner_of(fleet, *keys, ApiKey.of("ended", "t", frozenset({"m"}), expires=1.0))


async def test_what_is_printed_at_the_start(capsys):
    banners = {
        "no key": banner_of(ready_fleet()),
        "models that nothing serves": banner_of(unserved_fleet()),
        "keys for an alias and more": keyed_banner(["alias"], ["alias", "m"]),
        "most keys for an alias": keyed_banner(["m"], ["alias"], ["alias"]),
        "a key for a model that is not served": keyed_banner(["gone"], ["n"]),
        "a key for all models and one for another": keyed_banner(None, ["n"]),
        "keys for all models": keyed_banner(None, None),
        "no key for a model that is served": keyed_banner(["gone"]),
        "a model that failed to load": banner_of(failed_fleet()),
        "a key for it alone": banner_of(failed_fleet(), ApiKey.of("k", "t", frozenset({"broken"}))),
        "an engine that an operator drained": banner_of(drained_fleet()),
    }
    for host in ("127.0.0.1", "0.0.0.0", "::", "fd00::7"):
        Banner(Fleet(), host, 8000, Settings(reuse=True)).print_addresses()
    said = {
        "addresses that can be connected to": capsys.readouterr().out.replace(version("kvpin"), "VERSION")
    }
    for title, banner in banners.items():
        await banner.print_when_ready()
        said[title] = capsys.readouterr().out
    check_golden(Path(__file__).with_name("banners.txt"), said)


async def test_it_is_not_ready_before_it_knows_what_other_kvpins_know(capsys):
    joined = asyncio.Event()
    banner = banner_of(ready_fleet(), has_joined=joined.is_set)
    task = asyncio.create_task(banner.print_when_ready())
    await asyncio.sleep(0.2)
    assert capsys.readouterr().out == ""
    joined.set()
    await task
    assert capsys.readouterr().out.startswith("ready: m on a\n")


async def test_engines_that_are_down_are_named_before_the_others_are_ready(capsys):
    fleet = Fleet()
    down, loading = fleet.add(FakeAdapter("down")), fleet.add(FakeAdapter("loading"))
    down.state, down.last_error = EngineState.DOWN, "connection refused"
    task = asyncio.create_task(banner_of(fleet).print_when_ready())
    await asyncio.sleep(0)
    url = down.adapter.spec.url
    expected = f"not reachable: down at {url}: connection refused; kvpin keeps trying\n"
    assert capsys.readouterr().out == expected
    fleet.join(loading, loading.adapter.info)
    loading.state = EngineState.READY
    await task
    assert capsys.readouterr().out.startswith("ready: m on loading\n")


def fleet_of(*states):
    fleet = Fleet()
    for number, state in enumerate(states):
        engine = fleet.add(FakeAdapter(f"e{number}"))
        if state is EngineState.READY:
            fleet.join(engine, INFO)
        engine.state = state
    return fleet


def test_on_a_terminal_lines_appear_above_the_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    fleet = fleet_of(EngineState.READY, EngineState.CONNECTING)
    with waiting_bar(fleet, lambda: True) as draw:
        draw()
        print("a line of the text")  # noqa: T201
        print("a line of the log", file=sys.stderr)  # noqa: T201
    written = out.getvalue()
    assert "1/2 engines ready, e1 connecting" in written
    assert written.index("a line of the text") < written.index("a line of the log") < written.rindex("1/2")
    assert err.getvalue() == ""
    assert sys.stderr is err


@pytest.mark.parametrize("of", ["stdout", "stderr"])
def test_nothing_where_one_of_both_goes_elsewhere(monkeypatch, of):
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(sys, of, io.StringIO())
    with waiting_bar(fleet_of(EngineState.CONNECTING), lambda: True) as draw:
        draw()
    assert out.getvalue() == err.getvalue() == ""
