import asyncio
import io
import json
import logging
import sys
from dataclasses import replace

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


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("fd00::7", "http://[fd00::7]:8000"),
    ],
)
def test_it_names_addresses_that_can_be_connected_to(capsys, host, shown):
    Banner(Fleet(), host, 8000, Settings(reuse=True)).print_addresses()
    printed = capsys.readouterr().out
    assert f"base_url  {shown}/v1\n" in printed
    assert f"admin     {shown}/admin/v1\n" in printed
    assert "reuse on" in printed


async def test_once_engines_are_ready_there_is_a_request_to_copy(capsys):
    await banner_of(ready_fleet()).print_when_ready()
    printed = capsys.readouterr().out
    assert "ready: m on a\n" in printed
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in printed
    body = json.loads(printed.partition("-d '")[2].partition("'")[0])
    assert body["model"] == "m"
    assert "authorization" not in printed


async def test_it_is_not_ready_before_it_knows_what_other_kvpins_know(capsys):
    joined = asyncio.Event()
    banner = banner_of(ready_fleet(), has_joined=joined.is_set)
    task = asyncio.create_task(banner.print_when_ready())
    await asyncio.sleep(0.2)
    assert capsys.readouterr().out == ""
    joined.set()
    await task
    assert capsys.readouterr().out.startswith("ready: m on a\n")


async def test_it_names_models_that_settings_name_and_nothing_serves(capsys):
    fleet = ready_fleet()
    fleet.aliases, fleet.default_model = {"gpt": "m", "lost": "gone"}, "nothere"
    await banner_of(fleet).print_when_ready()
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "ready: m on a", "not served: gone (alias 'lost')", "not served: nothere (default model)", "try it:",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("models", "model", "of"),
    [
        ([["alias"], ["alias", "m"]], "alias", "one of your keys"),
        ([["m"], ["alias"], ["alias"]], "alias", "a key for alias"),
        ([["gone"], ["n"]], "n", "a key for n"),
        ([None, ["n"]], "n", "one of your keys"),
        ([None, None], "m", "one of your keys"),
        ([["gone"]], None, None),
    ],
)
async def test_the_request_is_for_a_model_that_the_key_is_for(capsys, models, model, of):
    fleet = ready_fleet()
    add_ready(fleet, "b", model="n")
    fleet.aliases = {"alias": "m"}
    keys = [ApiKey.of(f"k{at}", "t", frozenset(each) if each else None) for at, each in enumerate(models)]
    ended = ApiKey.of("ended", "t", frozenset({"m"}), expires=1.0)
    await banner_of(fleet, *keys, ended).print_when_ready()
    printed = capsys.readouterr().out
    assert (f"try it, with {of} in OPENAI_API_KEY:\n" in printed) is (of is not None)
    assert (f'"model": "{model}"' in printed) is (model is not None)
    assert ("curl" in printed) is (model is not None)
    assert ("not served: gone (a key of tenant 't' is for it)\n" in printed) is (["gone"] in models)


async def test_a_model_that_failed_to_load_is_neither_ready_nor_in_the_request(capsys):
    class Failed(FakeAdapter):
        model_state = ModelState.FAILED

    fleet = Fleet()
    for name, kind in (("broken", Failed), ("good", FakeAdapter)):
        engine = fleet.add(kind(name, info=replace(INFO, model=name)))
        fleet.join(engine, engine.adapter.info)
        engine.state = EngineState.READY
    failed = fleet.engine("broken")
    failed.state, failed.last_error = EngineState.SUSPECT, "its model failed to load"
    await banner_of(fleet).print_when_ready()
    printed = capsys.readouterr().out
    assert printed.startswith("suspect: broken: its model failed to load\nready: good on good\ntry it:\n")
    assert '"model": "good"' in printed
    await banner_of(fleet, ApiKey.of("k", "t", frozenset({"broken"}))).print_when_ready()
    assert '"model": "broken"' in capsys.readouterr().out  # the only model that a key is for


async def test_an_engine_that_an_operator_drained_is_told_apart(capsys):
    fleet = fleet_of(EngineState.READY, EngineState.READY)
    fleet.engine("e1").state = EngineState.DRAINING
    await banner_of(fleet).print_when_ready()
    assert capsys.readouterr().out.startswith("ready: m on e0, e1 (drained)\n")


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
