import io
import json
import logging
import sys

import pytest
import structlog

from proxy.observe import logs
from proxy.settings import LogSettings


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
    assert {name: line[name] for name in ("event", "level", "engine", "tokens")} == {
        "event": "engine is ready",
        "level": "info",
        "engine": "a",
        "tokens": 5,
    }
    assert line["timestamp"].endswith("Z")


def test_what_is_too_long_for_a_line_is_cut():
    stream = configured()
    structlog.get_logger("test").info("engine failed", error="e" * 1_000_000, tokens=5)
    (line,) = lines(stream)
    assert line["error"] == "e" * 4000 + "… (1000000 characters)"
    assert line["tokens"] == 5


def test_pretty_lines_on_a_terminal():
    stream = configured(Terminal())
    structlog.get_logger("test").info("engine is ready", engine="a")
    assert "engine is ready" in stream.getvalue()
    with pytest.raises(json.JSONDecodeError):
        lines(stream)


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
